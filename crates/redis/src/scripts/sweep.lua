#!lua flags=allow-oom
-- KEYS: meta all open due scopes entry...
-- ARGV: clock touch member...
local removed = 0
for at = 6, #KEYS do
  local member = ARGV[at - 3]
  local e, before, pruned = load(KEYS[at], member)
  removed = removed + pruned
  if not e then
    redis.call('ZREM', DUE, member)
  else
    note_lapse(KEYS[at], member, e, before)
    -- A restart may have prolonged its lease.
    if e[STAGE] == HELD and e[LEASE] > 0 then redis.call('ZADD', DUE, e[UNTIL], member) end
  end
end
return answer('done', now, removed)
