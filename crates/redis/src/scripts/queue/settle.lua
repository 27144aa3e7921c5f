#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits entry...
-- ARGV: clock touch seed floor settings element...
-- Each element: sequence, id, fence, how, after_ms, error, parked_for, claim. `after_ms` is -1 if it was not given; an error begins
-- with `=`. The last two are the places of entries among the keys that follow the queue's, or 0; behind a claim stand its fence,
-- nonce, ending, failed, value, omitted and ttl_ms.
if closed then return answer('closed', closed) end
-- In a FIFO group, others that have lapsed before it count. `find` looks at the delivery itself.
if C[S.fifo] then tick(20) end
local answers = {}

local function settle(s, m, how, after, problem)
  if how == 'undo' then
    if m[F.state] ~= IN_FLIGHT then return 'not-in-flight', 0 end
    -- As if it had not been received.
    leave(s, m)
    m[F.attempts], m[F.deliveries], m[F.received_ms] = m[F.attempts] - 1, m[F.deliveries] - 1, 0
    if m[F.deliveries] == 0 then m[F.first] = 0 end
    enter(s, m, IS_READY)
    bump(N.delivered, -1)
    return 'returned', 0
  end
  if how == 'ack' then
    if m[F.state] ~= IN_FLIGHT and C[S.fifo] then return 'expired', 0 end
    remove(s, m)
    decided(m)
    bump(N.acked, 1)
    return 'acked', 0
  end
  if m[F.state] ~= IN_FLIGHT then return 'not-in-flight', 0 end
  put_back_later(s, m)
  if how == 'retry' then
    bump(N.retried, 1)
    m[F.received_ms] = 0
    return fail(s, m, 'retry', problem, after >= 0 and after or nil)
  elseif how == 'defer' then
    bump(N.deferred, 1)
    m[F.attempts], m[F.received_ms] = m[F.attempts] - 1, 0
    put_back(s, m, after)
    return 'returned', after
  elseif how == 'park' then
    remember(m, 'in-doubt', problem)
    halt(s, m)
    leave(s, m)
    m[F.attempts] = m[F.attempts] - 1
    m[F.parked], m[F.parked_error] = 'in-doubt', problem or false
    enter(s, m, IS_PARKED)
    return 'parked', 0
  end
  remember(m, 'rejected', problem)
  return die(s, m, 'rejected', problem)
end

local at, sequences = 6, {}
while at <= #ARGV do
  sequences[#sequences + 1] = padded(tonumber(ARGV[at]))
  at = at + (ARGV[at + 7] == '0' and 8 or 15)
end
prefetch(sequences)
at = 6
while at <= #ARGV do
  local s, problem = padded(tonumber(ARGV[at])), nil
  if ARGV[at + 5] ~= '' then problem = string.sub(ARGV[at + 5], 2) end
  -- The claim first: a token that is stale blocks the settle, a receipt that is stale does not block the end of the claim.
  local claim, next_at, ended, changed = tonumber(ARGV[at + 7]), at + 8, 'done', 0
  if claim > 0 and ledger_closed then
    ended = 'closed'
  elseif claim > 0 then
    -- An entry that cannot be read does not end the script behind settles that were made.
    local fine, told, _, has_changed = pcall(
      finish, KEYS[@KEYS@ + claim], tonumber(ARGV[at + 8]), ARGV[at + 9], ARGV[at + 10], ARGV[at + 11] == '1', ARGV[at + 12],
      tonumber(ARGV[at + 13]), tonumber(ARGV[at + 14])
    )
    if fine then ended, changed = told, has_changed else ended = 'damaged' end
  end
  if claim > 0 then next_at = at + 15 end
  local m, why
  if ended == 'done' then m, why = find(s, ARGV[at + 1], ARGV[at + 2]) end
  local how, after, parked_for = ARGV[at + 3], tonumber(ARGV[at + 4]), tonumber(ARGV[at + 6])
  if ended ~= 'done' then
    answers[#answers + 1] = { 'claim ' .. ended, 0, changed }
  elseif m then
    -- Nothing would wake it any more if its entry is not in doubt.
    local is_read, e = true, nil
    if parked_for > 0 then is_read, e = pcall(load_entry, KEYS[@KEYS@ + parked_for]) end
    if parked_for > 0 and is_read and not (e and is_in_doubt(e)) then how, after = 'defer', 0 end
    local told, detail = settle(s, m, how, after, problem)
    answers[#answers + 1] = { told, detail or 0, changed }
  else
    answers[#answers + 1] = { why, 0, changed }
  end
  at = next_at
end
return answer('done', answers)
