#!lua
-- KEYS: meta all open due scopes needs resumed entry messages waits
-- ARGV: clock touch scope key owner fingerprint lease_ms parks nonce open_max queue sequence message
-- `message` is the id of the message that the claim is for, and `queue` and `sequence` say where it is; empty: there is none.
if ledger_closed then return closed() end
local entry, scope, owner = KEYS[8], ARGV[3], ARGV[5]
local lease, parks, queue = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[11]
local e, before, pruned = load_entry(entry)

-- The entry is kept as long as the message lives.
local function link()
  local raw = redis.call('HGET', KEYS[9], ARGV[12])
  -- What cannot be read is told by the queue.
  local fine, m = pcall(cmsgpack.unpack, raw or '')
  if not fine or type(m) ~= 'table' or m[@MESSAGE_ID@] ~= ARGV[13] then return end
  local need = queue .. ' ' .. member_of(entry)
  for _, known in ipairs(m[@MESSAGE_NEEDS@]) do
    if known == need then return end
  end
  table.insert(m[@MESSAGE_NEEDS@], need)
  redis.call('HSET', KEYS[9], ARGV[12], cmsgpack.pack(m))
  redis.call('HSET', KEYS[10], ARGV[13], ARGV[12])
  begin_need(member_of(entry), queue, ARGV[13])
end
if ARGV[13] ~= '' then link() end

local takeover, takeovers = 0, 0
if e then
  if e[FINGERPRINT] ~= ARGV[6] then return answer('mismatch', pruned) end
  if e[STAGE] >= COMPLETED then
    return answer('ended', pruned, e[UNTIL], one_if(e[STAGE] == FAILED), e[VALUE], e[OMITTED])
  end
  if e[STAGE] == HELD and e[OWNER] == owner then
    -- The same claim again: its answer was lost. What its first request said about doubt stands.
    if is_in_doubt(e) then resume(entry) end
    e[LEASE], e[UNTIL] = lease, math.max(e[UNTIL], now + lease)
    write_entry(entry, scope, before, e)
    return answer('granted', pruned, e[FENCE], e[NONCE], e[UNTIL] - now, one_if(e[TAKEOVERS] > 0), 0)
  end
  if not is_in_doubt(e) then return answer('held', pruned, e[UNTIL] - now) end
  if parks == 1 then
    note_lapse(entry, e, before)
    return answer('doubt', pruned, e[UNTIL])
  end
  takeover, takeovers = 1, e[TAKEOVERS] + 1
  resume(entry)
else
  local open = tonumber(redis.call('HGET', SCOPES, 'open ' .. scope) or 0)
  if open >= tonumber(ARGV[10]) then
    local in_doubt = tonumber(redis.call('HGET', SCOPES, 'doubt ' .. scope) or 0)
    return answer('full', pruned, open, in_doubt)
  end
end
local fence = next_fence()
local claim = { scope, ARGV[4], fence, ARGV[9], owner, ARGV[6], now, takeovers, HELD, lease, now + lease, parks, '', -1 }
write_entry(entry, scope, before, claim)
return answer('granted', pruned, fence, ARGV[9], lease, takeover, 1)
