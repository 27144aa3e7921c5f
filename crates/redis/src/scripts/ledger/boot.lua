#!lua flags=allow-oom
-- KEYS: meta
-- ARGV: clock term cause
-- A server that was restarted or replaced gives every open claim a full lease from now on, once in its term. Another process
-- that finds the same term has nothing to do; one that only opens the store begins a term where none is known.
local now, term, cause = ARGV[1], ARGV[2], ARGV[3]
if now == '' then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local known = redis.call('HGET', KEYS[1], 'term')
local begins = cause == 'restarted' or known ~= term
if not known and cause == 'opened' then begins = false end
if begins then redis.call('HSET', KEYS[1], 'boot', math.floor(now / 1000)) end
if known ~= term then redis.call('HSET', KEYS[1], 'term', term) end
return 1
