#!lua
-- KEYS: meta all open due scopes needs resumed entry
-- ARGV: clock touch scope key owner fingerprint claimed takeovers stage at ttl_ms parks value omitted nonce imported_ms ttl_max
-- Adds an entry of another store, unless its key is known. Its time may be over because a message needed it, which may come
-- later: it is kept for `imported_ms` at least.
if ledger_closed and string.sub(ledger_closed, 1, 4) ~= 'from' then return closed() end
local entry, stage, at, lease = KEYS[8], tonumber(ARGV[9]), tonumber(ARGV[10]), 1
local e, before, pruned = load_entry(entry)
if e then return answer('there', pruned) end
local kept = now + tonumber(ARGV[16])
if stage == DOUBTED then
  at = math.min(math.max(at, kept - @DOUBT_RETENTION_MS@), now)
else
  lease = math.max(math.min(math.max(at + tonumber(ARGV[11]), kept), now + tonumber(ARGV[17])) - at, 0)
end
local fence = next_fence()
write_entry(entry, ARGV[3], before, {
  ARGV[3], ARGV[4], fence, ARGV[15], ARGV[5], ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]),
  stage, lease, at, tonumber(ARGV[12]), ARGV[13], tonumber(ARGV[14]),
})
return answer('added', pruned)
