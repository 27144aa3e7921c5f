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
local told, values = answer('done'), {}
for counter = N.messages, N.damaged do values[counter - 1] = counts[counter] end
-- What has left this queue and not yet arrived in the other one is in flight here: a message is never in neither.
values[N.in_flight - 1] = values[N.in_flight - 1] + count_moving()
local oldest = call('ZRANGE', SENT, 0, 0, 'WITHSCORES')[2]
told[7], told[8], told[9], told[10] = values, halted, tonumber(oldest or -1), groups
return told
