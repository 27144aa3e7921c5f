#!lua flags=allow-oom
-- KEYS: meta all open due scopes needs resumed entry
-- ARGV: clock touch fence nonce ending failed value omitted ttl_ms
if ledger_closed then return closed() end
local status, pruned, changed = finish(
  KEYS[8], tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6] == '1', ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
)
return answer(status, pruned, changed)
