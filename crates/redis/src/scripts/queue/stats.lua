#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings halted_max
tick(100)
local groups, halted = {}, 0
for _, member in ipairs(redis.call('ZRANGEBYLEX', HALTED, '-', '+', 'LIMIT', 0, tonumber(ARGV[6]))) do
  local group = string.match(member, '^%S+')
  if groups[#groups] ~= group then
    groups[#groups + 1] = group
    local from, to = group_range(group)
    local in_flight = tonumber(redis.call('HGET', SIDE, 'f:' .. group) or 0)
    halted = halted + redis.call('ZLEXCOUNT', GROUPS, from, to) - in_flight
  end
end
local names = {
  'ready', 'delayed', 'in_flight', 'parked', 'bytes', 'messages', 'sent', 'duplicates', 'delivered', 'acked', 'retried', 'deferred',
  'expired', 'dead', 'stale', 'retention_dropped',
}
local told = answer('done')
local values = redis.call('HMGET', INFO, unpack(names))
for at = 1, #names do values[at] = tonumber(values[at] or 0) end
-- What has left this queue and not yet arrived in the other one is in flight here: a message is never in neither.
values[3] = values[3] + count_moving()
local oldest = redis.call('ZRANGE', SENT, 0, 0, 'WITHSCORES')[2]
told[7], told[8], told[9], told[10] = values, halted, tonumber(oldest or -1), groups
return told
