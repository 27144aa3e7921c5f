#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings element...
-- Each element: sequence, id, fence, how, after_ms, error. `after_ms` is -1 if it was not given; an error begins with `=`.
tick(20)
local answers = {}

local function settle(s, m, how, after, problem)
  if how == 'undo' then
    if m[F.state] ~= IN_FLIGHT then return 'not-in-flight', 0 end
    -- As if it had not been received.
    leave(s, m)
    m[F.attempts], m[F.deliveries], m[F.received_ms] = m[F.attempts] - 1, m[F.deliveries] - 1, 0
    if m[F.deliveries] == 0 then m[F.first] = 0 end
    enter(s, m, IS_READY)
    bump('delivered', -1)
    return 'returned', 0
  end
  if how == 'ack' then
    if m[F.state] ~= IN_FLIGHT and C.fifo then return 'expired', 0 end
    remove(s, m)
    decided(m)
    bump('acked', 1)
    return 'acked', 0
  end
  if m[F.state] ~= IN_FLIGHT then return 'not-in-flight', 0 end
  put_back_later(s, m)
  if how == 'retry' then
    bump('retried', 1)
    m[F.received_ms] = 0
    return fail(s, m, 'retry', problem, after >= 0 and after or nil)
  elseif how == 'defer' then
    bump('deferred', 1)
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

for at = 6, #ARGV, 6 do
  local s, problem = padded(tonumber(ARGV[at])), nil
  if ARGV[at + 5] ~= '' then problem = string.sub(ARGV[at + 5], 2) end
  local m, why = find(s, ARGV[at + 1], ARGV[at + 2])
  if m then
    local told, detail = settle(s, m, ARGV[at + 3], tonumber(ARGV[at + 4]), problem)
    answers[#answers + 1] = { told, detail or 0 }
  else
    answers[#answers + 1] = { why, 0 }
  end
end
return answer('done', answers)
