#!lua
-- KEYS: meta documents names
-- ARGV: clock name value expected count_max bytes_max
-- `expected` is any, absent or a revision. A document is kept as its revision, its time and its value, with spaces between.
local now = ARGV[1]
if now == '' then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local found = redis.call('HGET', KEYS[2], ARGV[2])
local revision = found and string.match(found, '^%d+') or ''
local expected = ARGV[4]
-- WAIT counts the writes of its own connection, also for a refusal that rests on the write of another one.
redis.call('HINCRBY', KEYS[1], 'touched', 1)
local fits = expected == 'any' or (expected == 'absent' and revision == '') or expected == revision
if not fits then return { 'conflict', revision } end
local count = redis.call('HLEN', KEYS[2])
if not found then count = count + 1 end
local size = #ARGV[2] + #ARGV[3]
if found then size = size - #ARGV[2] - #string.match(found, '^%d+ %d+ (.*)$') end
local bytes = tonumber(redis.call('HGET', KEYS[1], 'document_bytes') or 0) + size
if count > tonumber(ARGV[5]) or bytes > tonumber(ARGV[6]) then return { 'full', count, bytes } end
local next = string.format('%.0f', redis.call('HINCRBY', KEYS[1], 'document_revision', 1))
redis.call('HSET', KEYS[1], 'document_bytes', bytes)
redis.call('HSET', KEYS[2], ARGV[2], next .. string.format(' %.0f ', math.floor(now / 1000)) .. ARGV[3])
redis.call('ZADD', KEYS[3], 0, ARGV[2])
return { 'done', next }
