#!lua flags=allow-oom
-- KEYS: meta all open due scopes needs resumed entry audit
-- ARGV: clock touch decision failed value omitted ttl_ms nonce by what
if ledger_closed then return closed() end
local entry, decision = KEYS[8], ARGV[3]
local e, before, pruned = load_entry(entry)
if not e then return answer('absent', pruned) end
if e[STAGE] == HELD and e[UNTIL] > now then return answer('held', pruned, e[UNTIL] - now) end
if decision ~= 'forget' and e[STAGE] >= COMPLETED then return answer('ended', pruned) end
resume(entry)
if decision == 'completed' then
  e[STAGE] = COMPLETED
  if ARGV[4] == '1' then e[STAGE] = FAILED end
  -- A new fence shuts out a holder that returns late.
  e[FENCE], e[NONCE], e[UNTIL], e[LEASE] = next_fence(), ARGV[8], now, tonumber(ARGV[7])
  e[VALUE], e[OMITTED] = ARGV[5], tonumber(ARGV[6])
  write_entry(entry, e[SCOPE], before, e)
else
  write_entry(entry, e[SCOPE], before, nil)
end
wake('c', member_of(entry))
redis.call('XADD', KEYS[9], 'MAXLEN', '~', 10000, '*', 'at_ms', now, 'by', ARGV[9], 'what', ARGV[10])
return answer('done', pruned)
