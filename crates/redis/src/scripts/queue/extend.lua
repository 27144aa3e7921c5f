#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings element...
-- Each element: sequence, id, fence, lease_ms, own.
if closed then return answer('closed', closed) end
-- In a FIFO group, others that have lapsed before it count. `find` looks at the delivery itself.
if C[S.fifo] then tick(20) end

local function extend(s, m, lease, own)
  local received, is_own
  if m[F.state] == IN_FLIGHT then
    received, is_own = m[F.received], m[F.own] == 1 or own
  elseif m[F.received_ms] ~= 0 and not C[S.fifo] then
    if lease == 0 then
      leave(s, m)
      enter(s, m, IS_READY)
      return 'done', 0
    end
    received, is_own = m[F.received_ms], own
  else
    return 'not-in-flight', 0
  end
  if now + lease - received > LEASE_MAX then return 'too-long', now + lease - received end
  local last = m[F.history][#m[F.history]]
  -- The delivery is late, and had failed by that.
  if m[F.state] ~= IN_FLIGHT and last and last[2] == m[F.deliveries] then table.remove(m[F.history]) end
  if lease == 0 then
    bump(N.retried, 1)
    fail(s, m, 'retry', nil, 0)
  else
    leave(s, m)
    m[F.received], m[F.own] = received, is_own and 1 or 0
    enter(s, m, IN_FLIGHT, now + lease)
  end
  return 'done', lease
end

local answers = {}
for at = 6, #ARGV, 5 do
  local s = padded(tonumber(ARGV[at]))
  local m, why = find(s, ARGV[at + 1], ARGV[at + 2])
  if m then
    local told, detail = extend(s, m, tonumber(ARGV[at + 3]), ARGV[at + 4] == '1')
    answers[#answers + 1] = { told, detail }
  else
    answers[#answers + 1] = { why, 0 }
  end
end
return answer('done', answers)
