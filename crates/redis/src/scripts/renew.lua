#!lua flags=allow-oom
-- KEYS: meta all open due scopes entry
-- ARGV: clock touch member fence nonce lease_ms
local entry, member, lease = KEYS[6], ARGV[3], tonumber(ARGV[6])
local e, before, pruned = load(entry, member)
if not e then return answer('gone', now, pruned) end
if e[FENCE] ~= tonumber(ARGV[4]) or e[NONCE] ~= ARGV[5] then return answer('stale', now, pruned) end
if e[STAGE] >= COMPLETED then return answer('ended', now, pruned) end
if e[STAGE] == DOUBTED then return answer('stale', now, pruned) end
local shorter = one_if(now + lease < e[UNTIL])
e[LEASE], e[UNTIL] = lease, now + lease
write(entry, member, e[SCOPE], before, e)
return answer('done', now, pruned, shorter)
