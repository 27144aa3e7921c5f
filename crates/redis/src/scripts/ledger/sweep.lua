#!lua flags=allow-oom
-- KEYS: meta all open due scopes needs resumed entry...
-- ARGV: clock touch
local removed, damaged = 0, 0
for at = @KEYS@ + 1, ledger_closed and 0 or #KEYS do
  local entry = KEYS[at]
  local fine, e, before, pruned = pcall(load_entry, entry)
  if not fine then
    -- One entry that cannot be read does not keep the others from being swept. It stays for an operator.
    redis.call('ZADD', ENTRIES_DUE, now + HOUR_MS, member_of(entry))
    damaged, pruned = damaged + 1, 0
  elseif not e then
    redis.call('ZREM', ENTRIES_DUE, member_of(entry))
  else
    note_lapse(entry, e, before)
    -- A restart may have prolonged its lease.
    if e[STAGE] == HELD and e[LEASE] > 0 then redis.call('ZADD', ENTRIES_DUE, e[UNTIL], member_of(entry)) end
  end
  removed = removed + pruned
end
return answer('done', removed, damaged)
