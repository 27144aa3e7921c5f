#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits entry...
-- ARGV: clock touch seed floor settings how by group id...
-- Discards or releases messages, or lets a group continue. `resume` releases what is parked for a doubt. `release` has the
-- entry of each message among its keys; `keys` says which messages are parked, and the keys that name their entries. The
-- others are for callers that do not know the queue: `unhalt` and `unneed` say that a message elsewhere was decided about, `need` that one
-- needs an entry, `await` that a group waits for one.
if closed and ARGV[6] ~= 'need' and ARGV[6] ~= 'unneed' and ARGV[6] ~= 'unhalt' and ARGV[6] ~= 'await' then
  return answer('closed', closed)
end
tick(20)
local how, group = ARGV[6], ARGV[8]
local done, found = 0, {}
if how == 'release-group' then
  local from, to = group_range(group)
  for _, member in ipairs(redis.call('ZRANGEBYLEX', HALTED, from, to, 'LIMIT', 0, 1000)) do
    if unhalt(string.sub(member, #group + 2)) then done = done + 1 end
  end
end
for at = 9, #ARGV do
  local s = call('HGET', IDS, ARGV[at])
  local m = s and load(s)
  if how == 'need' then
    begin_need(group, C[S.name], ARGV[at])
  elseif how == 'unneed' then
    end_need(group, C[S.name], ARGV[at])
  elseif how == 'await' then
    -- `group` has the waiting queue and the place that the letter returns to.
    local queue, place = string.match(group, '^(%S+) (%S+)$')
    if m and m[F.dead] then
      local halts = {}
      for _, other in ipairs(m[F.halts]) do
        if other ~= queue then halts[#halts + 1] = other end
      end
      halts[#halts + 1] = queue
      m[F.halts], m[F.died_at] = halts, tonumber(place)
      write_message(s, m)
      redis.call('HSET', WAITS, m[F.id], s)
      done = done + 1
    end
  elseif how == 'unhalt' then
    if unhalt(ARGV[at]) then done = done + 1 end
  elseif how == 'keys' then
    if m and m[F.state] == IS_PARKED then
      found[#found + 1] = m[F.id]
      found[#found + 1] = m[F.key]
    end
  elseif m and m[F.state] == IS_PARKED and ((how == 'release' and m[F.parked] ~= 'damaged') or (how == 'resume' and m[F.parked] == 'in-doubt')) then
    leave(s, m)
    m[F.attempts], m[F.received_ms], m[F.parked], m[F.parked_error] = 0, 0, false, false
    m[F.history], m[F.retained] = {}, now
    enter(s, m, IS_READY)
    unhalt(m[F.id])
    done = done + 1
    -- Its failure is not kept, or it would be replayed. The next claim tells of a damaged entry.
    if how == 'release' then
      local entry = KEYS[@KEYS@ - 8 + at]
      local fine, e, indexes = pcall(load_entry, entry)
      if fine and e and e[STAGE] == FAILED then write_entry(entry, e[SCOPE], indexes, nil) end
    end
  elseif m and how == 'discard' and m[F.state] == IN_FLIGHT then
    found[#found + 1] = m[F.id]
  elseif m and how == 'discard' then
    remove(s, m)
    decided(m)
    unhalt(m[F.id])
    done = done + 1
  end
end
if done > 0 and ARGV[7] ~= '' then
  local what = how .. ' in queue ' .. C[S.name] .. ' ' .. group
  redis.call('XADD', AUDIT, 'MAXLEN', '~', 10000, '*', 'at_ms', now, 'by', ARGV[7], 'what', what)
end
return answer('done', done, found)
