#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings how interval_ms
-- Purges or deletes a queue. Messages that groups wait for or that need entries are removed one by one before the rest, at most
-- 500 in one script.
local deletes, interval = ARGV[6] == 'delete', tonumber(ARGV[7])
local purged = tonumber(redis.call('HGET', INFO, 'purged') or 0)
if closed and not deletes then return answer('closed', closed) end
if not deletes and purged > 0 and purged + interval > now then return answer('too-soon', purged + interval - now) end
local waits = redis.call('HRANDFIELD', WAITS, 500, 'WITHVALUES')
for at = 1, #waits, 2 do
  local s = waits[at + 1]
  local m = load(s)
  if m then
    remove(s, m)
    decided(m)
  else
    redis.call('HDEL', WAITS, waits[at])
  end
end
if #waits == 1000 then return answer('more', #waits / 2) end
local removed = counts[N.messages] + #waits / 2
for _, key in ipairs({ M, B, ALL, READY, DUE, GROUPS, RETAIN, SENT, IDS, DEDUP, DEDUP_AT, SIDE, TRIES_AT, HALTED, WAITS }) do
  call('UNLINK', key)
end
touched = {}
if deletes then
  is_counted = false
  redis.call('UNLINK', INFO)
  redis.call('ZREM', QUEUES, C[S.name])
  redis.call('ZADD', DELETED, now, C[S.name])
else
  for counter = N.messages, N.parked do counts[counter] = 0 end
  is_counted = true
  redis.call('HSET', INFO, 'purged', now)
end
return answer('done', removed)
