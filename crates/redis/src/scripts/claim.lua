#!lua
-- KEYS: meta all open due scopes entry
-- ARGV: clock touch member scope key owner fingerprint lease_ms parks nonce open_max
local entry, member, scope, owner = KEYS[6], ARGV[3], ARGV[4], ARGV[6]
local lease, parks = tonumber(ARGV[8]), tonumber(ARGV[9])
local e, before, pruned = load(entry, member)
local takeover, takeovers = 0, 0
if e then
  if e[FINGERPRINT] ~= ARGV[7] then return answer('mismatch', now, pruned) end
  if e[STAGE] >= COMPLETED then
    return answer('ended', now, pruned, e[UNTIL], one_if(e[STAGE] == FAILED), e[VALUE], e[OMITTED])
  end
  if e[STAGE] == HELD and e[OWNER] == owner then
    -- The same claim again: its answer was lost. What its first request said about doubt stands.
    e[LEASE], e[UNTIL] = lease, math.max(e[UNTIL], now + lease)
    write(entry, member, scope, before, e)
    return answer('granted', now, pruned, e[FENCE], e[NONCE], e[UNTIL] - now, one_if(e[TAKEOVERS] > 0), 0)
  end
  if not is_in_doubt(e) then return answer('held', now, pruned, e[UNTIL] - now) end
  if parks == 1 then
    note_lapse(entry, member, e, before)
    return answer('doubt', now, pruned, e[UNTIL])
  end
  takeover, takeovers = 1, e[TAKEOVERS] + 1
else
  local open = tonumber(redis.call('HGET', SCOPES, 'open ' .. scope) or 0)
  if open >= tonumber(ARGV[11]) then
    local in_doubt = tonumber(redis.call('HGET', SCOPES, 'doubt ' .. scope) or 0)
    return answer('full', now, pruned, open, in_doubt)
  end
end
local fence = next_fence()
local claim = { scope, ARGV[5], fence, ARGV[10], owner, ARGV[7], now, takeovers, HELD, lease, now + lease, parks, '', -1 }
write(entry, member, scope, before, claim)
return answer('granted', now, pruned, fence, ARGV[10], lease, takeover, 1)
