#!lua flags=allow-oom
-- KEYS: meta all open due scopes needs resumed entry
-- ARGV: clock touch fence nonce lease_ms
if ledger_closed then return closed() end
local entry, lease = KEYS[8], tonumber(ARGV[5])
local e, before, pruned = load_entry(entry)
if not e then return answer('gone', pruned) end
if e[FENCE] ~= tonumber(ARGV[3]) or e[NONCE] ~= ARGV[4] then return answer('stale', pruned) end
if e[STAGE] >= COMPLETED then return answer('ended', pruned) end
if e[STAGE] == DOUBTED then return answer('stale', pruned) end
if is_in_doubt(e) then resume(entry) end
local shorter = one_if(now + lease < e[UNTIL])
e[LEASE], e[UNTIL] = lease, now + lease
write_entry(entry, e[SCOPE], before, e)
if shorter == 1 then wake('c', member_of(entry)) end
return answer('done', pruned, shorter)
