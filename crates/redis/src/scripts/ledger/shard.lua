#!lua flags=allow-oom
-- KEYS: meta audit
-- ARGV: how value by what
-- Raises the fences of a shard, or closes its part of the ledger for a copy, or opens it.
if ARGV[1] == 'raise' then
  local last = tonumber(redis.call('HGET', KEYS[1], 'fence') or 0)
  redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', math.max(last, tonumber(ARGV[2]) - 1)), 'layout', @LAYOUT@)
elseif ARGV[1] == 'close' then
  redis.call('HSET', KEYS[1], 'closed', ARGV[2])
else
  redis.call('HDEL', KEYS[1], 'closed')
end
if ARGV[4] ~= '' then redis.call('XADD', KEYS[2], 'MAXLEN', '~', 10000, '*', 'by', ARGV[3], 'what', ARGV[4]) end
redis.call('HINCRBY', KEYS[1], 'touched', 1)
return 1
