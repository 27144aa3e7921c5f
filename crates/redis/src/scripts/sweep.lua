#!lua flags=allow-oom
-- KEYS: meta all open due scopes entry...
-- ARGV: clock touch member...
local HOUR_MS = 3600000
local removed, damaged = 0, 0
for at = 6, #KEYS do
  local member = ARGV[at - 3]
  local fine, e, before, pruned = pcall(load, KEYS[at], member)
  if not fine then
    -- One entry that cannot be read does not keep the others from being swept. It stays for an operator.
    redis.call('ZADD', DUE, now + HOUR_MS, member)
    damaged, pruned = damaged + 1, 0
  elseif not e then
    redis.call('ZREM', DUE, member)
  else
    note_lapse(KEYS[at], member, e, before)
    -- A restart may have prolonged its lease.
    if e[STAGE] == HELD and e[LEASE] > 0 then redis.call('ZADD', DUE, e[UNTIL], member) end
  end
  removed = removed + pruned
end
return answer('done', now, removed, damaged)
