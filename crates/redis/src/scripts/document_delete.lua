#!lua flags=allow-oom
-- KEYS: meta documents names
-- ARGV: name expected
local found = redis.call('HGET', KEYS[2], ARGV[1])
local revision = found and string.match(found, '^%d+') or ''
local expected = ARGV[2]
redis.call('HINCRBY', KEYS[1], 'touched', 1)
local fits = expected == 'any' or (expected == 'absent' and revision == '') or expected == revision
if not fits then return { 'conflict', revision } end
if found then
  local size = #ARGV[1] + #string.match(found, '^%d+ %d+ (.*)$')
  redis.call('HINCRBY', KEYS[1], 'document_bytes', -size)
  redis.call('HDEL', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
end
return { 'done', revision }
