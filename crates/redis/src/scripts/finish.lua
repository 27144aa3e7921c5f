#!lua flags=allow-oom
-- KEYS: meta all open due scopes entry
-- ARGV: clock touch member fence nonce ending failed value omitted ttl_ms
local entry, member, ending = KEYS[6], ARGV[3], ARGV[6]
local e, before, pruned = load(entry, member)
if not e then return answer('gone', now, pruned) end
if e[FENCE] ~= tonumber(ARGV[4]) or e[NONCE] ~= ARGV[5] then return answer('stale', now, pruned) end
local stage, omitted = COMPLETED, tonumber(ARGV[9])
if ARGV[7] == '1' then stage = FAILED end
if e[STAGE] >= COMPLETED then
  local same = ending == 'complete' and e[STAGE] == stage and e[VALUE] == ARGV[8] and e[OMITTED] == omitted
  if same then return answer('done', now, pruned, 0) end
  return answer('ended', now, pruned)
end
if ending == 'complete' then
  e[STAGE], e[UNTIL], e[LEASE], e[VALUE], e[OMITTED] = stage, now, tonumber(ARGV[10]), ARGV[8], omitted
  write(entry, member, e[SCOPE], before, e)
  return answer('done', now, pruned, 1)
end
if ending == 'release' then
  -- The holder declared that the effect may have happened, and cannot withdraw that.
  if e[STAGE] == DOUBTED then return answer('stale', now, pruned) end
  if e[TAKEOVERS] == 0 then
    write(entry, member, e[SCOPE], before, nil)
    return answer('done', now, pruned, 1)
  end
  -- A release after a takeover says nothing about the earlier holder's effect: the entry stays in doubt.
elseif e[STAGE] == DOUBTED then
  return answer('done', now, pruned, 0)
end
e[STAGE], e[UNTIL] = DOUBTED, math.min(now, e[UNTIL])
write(entry, member, e[SCOPE], before, e)
return answer('done', now, pruned, 1)
