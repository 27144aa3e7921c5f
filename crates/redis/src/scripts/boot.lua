#!lua flags=allow-oom
-- KEYS: meta
-- ARGV: clock
-- The server was restarted or replaced: from now on every open claim gets a full lease.
local now = ARGV[1]
if now == '' then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'boot', math.floor(now / 1000)) end
return 1
