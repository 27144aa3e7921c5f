#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings max lease_ms consumer ack attempt_id bytes_max
if closed then return answer('closed', closed) end
local max, lease, acks, attempt = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[9] == '1', ARGV[10]
local more, got, sequences, fences, bytes, full = tick(100), {}, {}, {}, 0, false

local function handed(s, m)
  bytes = bytes + m[F.bytes]
  full = #got + 1 >= max or bytes >= tonumber(ARGV[11])
  local at = #got + 1
  sequences[at], fences[at] = s, m[F.fence]
  -- Without a lease it may die before this call ends.
  got[at] = { tonumber(s), packed[s], (acks or lease == 0) and call('HGET', B, s) }
end

-- When there is something to look for, for a receive that has to wait.
local function next_due()
  if #got > 0 then return 0 end
  return tonumber(call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2] or 0)
end

local function ended(status, ...)
  refresh_groups()
  -- What it left, or found to be ready by time, others find by themselves.
  is_woken = false
  if #got > 0 and not acks and lease > 0 then
    local bodies = call('HMGET', B, unpack(sequences))
    for at, one in ipairs(got) do one[3] = bodies[at] end
  end
  return answer(status, got, next_due(), more and 1 or 0, ...)
end

if attempt ~= '' then
  local raw = redis.call('HGET', SIDE, 'a:' .. attempt)
  local tried = raw and cmsgpack.unpack(raw)
  if tried and now < tried[1] + @ATTEMPT_ID_MS@ then
    for at = 2, #tried do
      local s, given = tried[at][1], tried[at][2]
      local m = load(s)
      if m and m[F.fence] == given and m[F.state] == IN_FLIGHT and #got < max then
        if now + lease - m[F.received] <= LEASE_MAX then
          local until_ms = math.max(m[F.until_ms], now + lease)
          leave(s, m)
          enter(s, m, IN_FLIGHT, until_ms)
        end
        handed(s, m)
      end
    end
    if #got > 0 then return ended('done') end
  end
end
if paused then return ended('done') end
local in_flight = counts[N.in_flight]
local room = @IN_FLIGHT_MAX@ - in_flight
if room <= 0 then
  if C[S.fifo] then return ended('done') end
  return ended('crowded', in_flight)
end
max = math.min(max, room)

local function deliver(s, m)
  leave(s, m)
  m[F.received], m[F.received_ms], m[F.own], m[F.consumer] = now, now, 0, ARGV[8] ~= '' and ARGV[8] or false
  m[F.attempts], m[F.deliveries], m[F.fence] = m[F.attempts] + 1, m[F.deliveries] + 1, next_fence()
  if m[F.first] == 0 then m[F.first] = now end
  enter(s, m, IN_FLIGHT, now + lease)
  bump(N.delivered, 1)
  handed(s, m)
  if acks then
    remove(s, m)
    decided(m)
    bump(N.acked, 1)
  end
end

-- A lowered limit holds for what waits already.
local function is_spent(s, m)
  if C[S.limit] == 0 or m[F.attempts] < C[S.limit] then return false end
  local last = m[F.history][#m[F.history]]
  die(s, m, last and last[4] or 'expired', last and last[5] or nil)
  return true
end

local function is_noisy(m)
  if m[F.group] == '' then return false end
  local those = tonumber(redis.call('HGET', SIDE, 'f:' .. m[F.group]) or 0)
  return those >= 30 and those * 10 > in_flight
end

local function take_standard()
  local found = call('ZRANGE', READY, 0, counts[N.noisy] > 0 and 999 or max - 1, 'WITHSCORES')
  local rows, late, priority, died = {}, {}, nil, false
  local function close()
    for _, row in ipairs(late) do rows[#rows + 1] = row end
    late = {}
  end
  local looks, first = counts[N.noisy] > 0, {}
  for at = 1, #found, 2 do first[#first + 1] = found[at] end
  prefetch(first)
  for at = 1, #found, 2 do
    local s, this = found[at], math.floor(found[at + 1] / 562949953421312)
    local m = load(s)
    if this ~= priority then close() end
    priority = this
    if m[F.state] ~= IS_READY then
      -- It was found to be damaged; another one takes its place.
      died = true
    elseif looks and is_noisy(m) then
      late[#late + 1] = { s, m }
    else
      rows[#rows + 1] = { s, m }
    end
  end
  close()
  for _, row in ipairs(rows) do
    if full then break end
    if is_spent(row[1], row[2]) then died = true else deliver(row[1], row[2]) end
  end
  return died
end

local function take_group(group)
  local from, to = group_range(group)
  local died, first = false, true
  for _, member in ipairs(redis.call('ZRANGEBYLEX', GROUPS, from, to, 'LIMIT', 0, max)) do
    if full then break end
    local s = string.sub(member, #group + 2)
    local m = load(s)
    if m[F.group] ~= group then
      leave_group(s, m, group)
      died = true
      if C[S.halts] then break end
    elseif m[F.state] ~= IS_READY then
      break
    elseif is_spent(s, m) then
      died = true
      if C[S.halts] then break end
    else
      -- If attempts are limited, a head that has failed is delivered alone.
      local alone = first and C[S.limit] > 0 and (C[S.limit] == 1 or m[F.attempts] > 0)
      deliver(s, m)
      first = false
      if alone then break end
    end
  end
  return died
end

for _ = 1, 10 do
  local died = false
  if C[S.fifo] then
    for _, group in ipairs(call('ZRANGE', READY, 0, max - 1)) do
      if full then break end
      died = take_group(group) or died
    end
    refresh_groups()
  else
    died = take_standard()
  end
  if full or not died then break end
end
if attempt ~= '' and #got > 0 then
  local tried = { now }
  for at, s in ipairs(sequences) do tried[#tried + 1] = { s, fences[at] } end
  redis.call('HSET', SIDE, 'a:' .. attempt, cmsgpack.pack(tried))
  redis.call('ZADD', TRIES_AT, now, 'a:' .. attempt)
end
if lease == 0 then tick(100) end
return ended('done')
