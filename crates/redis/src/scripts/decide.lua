#!lua flags=allow-oom
-- KEYS: meta all open due scopes entry audit
-- ARGV: clock touch member decision failed value omitted ttl_ms nonce by what
local entry, member, decision = KEYS[6], ARGV[3], ARGV[4]
local e, before, pruned = load(entry, member)
if not e then return answer('absent', now, pruned) end
if e[STAGE] == HELD and e[UNTIL] > now then return answer('held', now, pruned, e[UNTIL] - now) end
if decision ~= 'forget' and e[STAGE] >= COMPLETED then return answer('ended', now, pruned) end
if decision == 'completed' then
  e[STAGE] = COMPLETED
  if ARGV[5] == '1' then e[STAGE] = FAILED end
  -- A new fence shuts out a holder that returns late.
  e[FENCE], e[NONCE], e[UNTIL], e[LEASE] = next_fence(), ARGV[9], now, tonumber(ARGV[8])
  e[VALUE], e[OMITTED] = ARGV[6], tonumber(ARGV[7])
  write(entry, member, e[SCOPE], before, e)
else
  write(entry, member, e[SCOPE], before, nil)
end
redis.call('XADD', KEYS[7], 'MAXLEN', '~', 10000, '*', 'at_ms', now, 'by', ARGV[10], 'what', ARGV[11])
return answer('done', now, pruned)
