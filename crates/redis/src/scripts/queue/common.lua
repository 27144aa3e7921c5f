-- Shared by all scripts of the queues; it stands in front of each of them.
--
-- A message is a MessagePack array under its sequence number in M, with its body in B. The other keys are indexes of them.
-- `enter` and `leave` keep the indexes and the counters; nothing else writes them.
-- The fields of a message. `queues/message.rs` reads them in this order.
local F = {
  id = 1, state = 2, until_ms = 3, received = 4, own = 5, sent = 6, retained = 7, first = 8, attempts = 9, deliveries = 10,
  group = 11, priority = 12, dead = 13, died_at = 14, parked = 15, parked_error = 16, history = 17, consumer = 18,
  fence = 19, received_ms = 20, bytes = 21, turn = 22, dedup = 23, key = 24, key_source = 25, halts = 26, needs = 27,
  visible = 28,
}
local FIELDS = 28
local IS_READY, IS_HIDDEN, IN_FLIGHT, IS_PARKED = 0, 1, 2, 3
local COUNTER = { [0] = 'ready', [1] = 'delayed', [2] = 'in_flight', [3] = 'parked' }
local LEASE_MAX = @LEASE_MS_MAX@

math.randomseed(tonumber(ARGV[3]))
math.random()

-- The settings as the caller knows them, with their revision.
local C = {}
do
  local word = ' (%S+)'
  local fifo, retention, limit, base, cap, jitter, halts, window, messages_max, bytes_max, once
  C.revision, C.name, C.dead_letters, fifo, retention, limit, base, cap, jitter, halts, window, messages_max, bytes_max, once =
    string.match(ARGV[5], '^(%S+)' .. string.rep(word, 13))
  C.fifo, C.halts, C.once = fifo == '1', halts == '1', once == '1'
  C.retention, C.limit, C.window, C.messages_max, C.bytes_max =
    tonumber(retention), tonumber(limit), tonumber(window), tonumber(messages_max), tonumber(bytes_max)
  C.base, C.cap, C.jitter = tonumber(base), tonumber(cap), tonumber(jitter)
end

-- The counters of a queue, by their places in `known`.
local COUNTERS = {
  seq = 4, messages = 5, bytes = 6, in_flight = 7, noisy = 8, ready = 9, delayed = 10, parked = 11, letters = 12, sent = 13,
  duplicates = 14, delivered = 15, acked = 16, retried = 17, deferred = 18, expired = 19, dead = 20, stale = 21,
  retention_dropped = 22,
}
local known = redis.call(
  'HMGET', INFO, 'revision', 'pause', 'copy', 'seq', 'messages', 'bytes', 'in_flight', 'noisy', 'ready', 'delayed', 'parked',
  'letters', 'sent', 'duplicates', 'delivered', 'acked', 'retried', 'deferred', 'expired', 'dead', 'stale', 'retention_dropped'
)
local seq, paused = tonumber(known[4] or 0), (known[2] or '') ~= ''
-- Why the queue is closed for a copy to or from another store; nil: it is open. Time does not change a closed queue.
local closed = known[3] or nil
local deltas, touched, moves, checks, decisions = {}, {}, {}, {}, 0
-- Whether messages became ready that others may wait for.
local is_woken = false
local fence = math.max(last_fence, tonumber(ARGV[4]))

local function bump(name, by)
  deltas[name] = (deltas[name] or 0) + by
end

local function count(name)
  return tonumber(known[COUNTERS[name]] or 0) + (deltas[name] or 0)
end

local function next_fence()
  fence = math.max(fence + 1, now_us)
  return fence
end

local function next_seq()
  seq = seq + 1
  bump('seq', 1)
  return seq
end

-- A sequence number as a member of the sorted sets: the order of the texts is that of the numbers.
local function padded(number)
  return string.format('%016.0f', number)
end

local function load(s)
  local raw = redis.call('HGET', M, s)
  if not raw then return nil end
  local fine, m = pcall(cmsgpack.unpack, raw)
  if not fine or type(m) ~= 'table' or #m ~= FIELDS then
    return error({ err = 'HAPAXDAMAGED message ' .. s .. ' of queue ' .. C.name .. ' cannot be read' })
  end
  return m
end

-- The bounds of a group's members in a set that is ordered by text. A group has no spaces.
local function group_range(group, after)
  return '(' .. group .. ' ' .. (after or ''), '(' .. group .. '!'
end

local function is_halted(group)
  local from, to = group_range(group)
  return #redis.call('ZRANGEBYLEX', HALTED, from, to, 'LIMIT', 0, 1) > 0
end

local function count_flight(m, by)
  if m[F.group] == '' then return end
  local field = 'f:' .. m[F.group]
  local left = redis.call('HINCRBY', SIDE, field, by)
  if left <= 0 then redis.call('HDEL', SIDE, field) end
  if by == 1 and left == 30 then bump('noisy', 1) end
  if by == -1 and left == 29 then bump('noisy', -1) end
end

local function touch(m)
  if C.fifo then touched[m[F.group]] = true end
end

-- Takes a message out of the indexes of its state.
local function leave(s, m)
  local state = m[F.state]
  bump(COUNTER[state], -1)
  if state == IS_READY and not C.fifo then redis.call('ZREM', READY, s) end
  if state == IS_HIDDEN or state == IN_FLIGHT then redis.call('ZREM', DUE, s) end
  if state == IS_READY or state == IS_HIDDEN then redis.call('ZREM', RETAIN, s) end
  if state == IN_FLIGHT then count_flight(m, -1) end
  touch(m)
end

-- Brings a message that has left into a state, and writes it.
local function enter(s, m, state, until_ms)
  m[F.state], m[F.until_ms] = state, until_ms or 0
  bump(COUNTER[state], 1)
  if state == IS_READY then is_woken = true end
  if state == IS_READY and not C.fifo then
    -- Below 2^53: nine priorities of 2^49 each.
    redis.call('ZADD', READY, (9 - m[F.priority]) * 562949953421312 + math.max(m[F.turn], tonumber(s)), s)
  end
  if state == IS_HIDDEN or state == IN_FLIGHT then redis.call('ZADD', DUE, m[F.until_ms], s) end
  if state == IN_FLIGHT then count_flight(m, 1) end
  if state == IS_READY or state == IS_HIDDEN then redis.call('ZADD', RETAIN, m[F.retained], s) end
  if C.fifo and state == IS_PARKED then
    redis.call('ZREM', GROUPS, m[F.group] .. ' ' .. s)
  elseif C.fifo then
    redis.call('ZADD', GROUPS, 0, m[F.group] .. ' ' .. s)
  end
  touch(m)
  redis.call('HSET', M, s, cmsgpack.pack(m))
end

local function insert(s, m, body, state, until_ms)
  redis.call('HSET', B, s, body)
  redis.call('HSET', IDS, m[F.id], s)
  redis.call('ZADD', ALL, tonumber(s), s)
  redis.call('ZADD', SENT, m[F.sent], s)
  if #m[F.halts] > 0 or #m[F.needs] > 0 then redis.call('HSET', WAITS, m[F.id], s) end
  bump('messages', 1)
  bump('bytes', m[F.bytes])
  if m[F.dead] then bump('letters', 1) end
  enter(s, m, state, until_ms)
end

local function remove(s, m)
  leave(s, m)
  redis.call('ZREM', ALL, s)
  redis.call('ZREM', SENT, s)
  if C.fifo then redis.call('ZREM', GROUPS, m[F.group] .. ' ' .. s) end
  redis.call('HDEL', M, s)
  redis.call('HDEL', B, s)
  redis.call('HDEL', IDS, m[F.id])
  if #m[F.halts] > 0 or #m[F.needs] > 0 then redis.call('HDEL', WAITS, m[F.id]) end
  bump('messages', -1)
  bump('bytes', -m[F.bytes])
  if m[F.dead] then bump('letters', -1) end
end

-- A message needs an entry of the ledger, which is in this shard, from now on.
local function need(m, entry)
  local member = member_of(entry)
  m[F.needs][#m[F.needs] + 1] = C.name .. ' ' .. member
  begin_need(member, C.name, m[F.id])
end

-- The message is gone, or was decided about. The groups that wait for it and the entries that it needs, in queues elsewhere,
-- are told by the caller, and until then it is written down here.
local function decided(m)
  local elsewhere = {}
  for _, queue in ipairs(m[F.halts]) do elsewhere[#elsewhere + 1] = queue end
  for _, known_need in ipairs(m[F.needs]) do
    local queue, member = string.match(known_need, '^(%S+) (%S+)$')
    if queue == C.name then
      end_need(member, queue, m[F.id])
    else
      elsewhere[#elsewhere + 1] = queue .. ':' .. member
    end
  end
  if #elsewhere == 0 then return end
  redis.call('HSET', DECIDED, m[F.id], table.concat(elsewhere, ' '))
  decisions = decisions + 1
end

-- The heads of the groups that were changed: a group is ready if its first message is, and it is not halted.
local function refresh_groups()
  for group in pairs(touched) do
    local from, to = group_range(group)
    local head = redis.call('ZRANGEBYLEX', GROUPS, from, to, 'LIMIT', 0, 1)[1]
    local m, s
    if head then
      s = string.sub(head, #group + 2)
      m = load(s)
    else
      redis.call('HDEL', SIDE, 't:' .. group, 'h:' .. group)
    end
    if m and m[F.state] == IS_READY and not is_halted(group) then
      local turn = tonumber(redis.call('HGET', SIDE, 't:' .. group) or 0)
      redis.call('ZADD', READY, math.max(turn, tonumber(s)), group)
      is_woken = true
    else
      redis.call('ZREM', READY, group)
    end
  end
  touched = {}
end

-- What was kept in a group has its whole retention again when the group is not halted any more.
local function unhalt(id)
  local group = redis.call('HGET', SIDE, 'u:' .. id)
  if not group then return false end
  redis.call('HDEL', SIDE, 'u:' .. id)
  redis.call('ZREM', HALTED, group .. ' ' .. id)
  if not is_halted(group) then
    touched[group] = true
    redis.call('HSET', SIDE, 'h:' .. group, now)
  end
  return true
end

-- Puts back, uncounted, what is in flight behind a message of a FIFO group.
local function put_back_later(s, m, batch_only)
  if not C.fifo then return end
  local from, to = group_range(m[F.group], s)
  local left = tonumber(redis.call('HGET', SIDE, 'f:' .. m[F.group]) or 0)
  if left == 0 then return end
  for _, member in ipairs(redis.call('ZRANGEBYLEX', GROUPS, from, to, 'LIMIT', 0, 1000)) do
    local other = string.sub(member, #m[F.group] + 2)
    local o = load(other)
    if o[F.state] == IN_FLIGHT then
      left = left - 1
      if not batch_only or o[F.own] == 0 then
        leave(other, o)
        o[F.attempts] = o[F.attempts] - 1
        enter(other, o, IS_READY)
      end
    end
    if left == 0 then break end
  end
end

-- A message is parked or dead: where the queue says so, its group is halted for it.
local function halt(s, m)
  if not C.halts or m[F.group] == '' then return false end
  redis.call('HSET', SIDE, 'u:' .. m[F.id], m[F.group])
  redis.call('ZADD', HALTED, 0, m[F.group] .. ' ' .. m[F.id])
  put_back_later(s, m)
  touch(m)
  return true
end

local function remember(m, cause, problem)
  local history = m[F.history]
  history[#history + 1] = { m[F.attempts], m[F.deliveries], now, cause, problem or false, m[F.consumer] }
  if #history > @HISTORY_MAX@ then table.remove(history, 1) end
  m[F.consumer] = false
end

-- Takes a message out, to be brought to another queue as `out`: by the caller, or by a sweep if the caller dies. It is kept
-- here until the other queue has it. `elsewhere` are the queues to be told then that it was decided about.
local function set_moving(s, m, out, target, kind, entry, elsewhere)
  local body = redis.call('HGET', B, s)
  remove(s, m)
  local number = next_fence()
  local move = string.format('%s %.0f', C.name, number)
  redis.call('ZADD', MOVES, number, move)
  redis.call('HSET', MOVING, move, cmsgpack.pack({ target, kind, m[F.id], s, cmsgpack.pack(out), entry or '', elsewhere or '', now }))
  redis.call('HSET', BODIES, move, body)
  moves[#moves + 1] = move
  return move
end

-- How many messages of this queue are on their way to another one, of the first 10,000 of this shard.
local function count_moving()
  local count = 0
  for _, move in ipairs(redis.call('ZRANGE', MOVES, 0, 9999)) do
    if string.sub(move, 1, #C.name + 1) == C.name .. ' ' then count = count + 1 end
  end
  return count
end

local function die(s, m, cause, problem)
  bump('dead', 1)
  local halted = halt(s, m)
  if C.dead_letters == '-' then
    leave(s, m)
    m[F.parked], m[F.parked_error] = cause, problem or false
    enter(s, m, IS_PARKED)
    return 'parked'
  end
  local last = problem
  for at = #m[F.history], 1, -1 do
    last = last or m[F.history][at][5]
  end
  local out = cmsgpack.unpack(cmsgpack.pack(m))
  out[F.dead] = { C.name, cause, last or false, m[F.attempts], m[F.deliveries], m[F.first], now }
  out[F.died_at], out[F.attempts] = tonumber(s), 0
  if halted then out[F.halts][#out[F.halts] + 1] = C.name end
  return 'moving', set_moving(s, m, out, C.dead_letters, 'dead')
end

-- Makes a message visible behind the ready ones, and moves its FIFO group behind the other groups.
local function put_back(s, m, after)
  leave(s, m)
  m[F.turn] = next_seq()
  if C.fifo then redis.call('HSET', SIDE, 't:' .. m[F.group], m[F.turn]) end
  if after == 0 then enter(s, m, IS_READY) else enter(s, m, IS_HIDDEN, now + after) end
end

local function delay(attempt)
  local ceiling = math.min(C.base * 2 ^ math.max(attempt - 1, 0), C.cap == 0 and LEASE_MAX or C.cap)
  if C.jitter == 0 then return ceiling end
  return math.floor(math.random() * (ceiling + 1))
end

-- By policy a failed delivery is retried, or its message dies.
local function fail(s, m, cause, problem, asked)
  remember(m, cause, problem)
  if C.limit > 0 and m[F.attempts] >= C.limit then return die(s, m, cause, problem) end
  local after = math.min(asked or delay(m[F.attempts]), LEASE_MAX)
  put_back(s, m, after)
  return 'returned', after
end

local function lapse(s, m)
  bump('expired', 1)
  if m[F.own] == 0 then put_back_later(s, m, true) end
  fail(s, m, 'expired', nil, nil)
end

-- The time from which the retention of a message counts: what a halted group has kept beyond it has it again from the time
-- at which the group has continued.
local function retained_from(m)
  if m[F.group] == '' then return m[F.retained] end
  local continued = tonumber(redis.call('HGET', SIDE, 'h:' .. m[F.group]) or 0)
  return m[F.retained] + C.retention < continued and continued or m[F.retained]
end

-- Drops messages whose retention is over. One that a group elsewhere may wait for stays, behind the others that are too old;
-- with `asks`, the caller finds out whether one does.
local function drop_old(bound, asks)
  local limit = now - C.retention
  local old = redis.call('ZRANGEBYSCORE', RETAIN, '-inf', string.format('(%.0f', limit), 'LIMIT', 0, bound)
  local dropped = 0
  for _, s in ipairs(old) do
    local m = load(s)
    if m[F.retained] >= limit then
      redis.call('ZADD', RETAIN, m[F.retained], s)
    elseif m[F.group] ~= '' and is_halted(m[F.group]) then
      -- It is looked at again after a whole retention.
      redis.call('ZADD', RETAIN, now, s)
    elseif retained_from(m) >= limit then
      redis.call('ZADD', RETAIN, retained_from(m), s)
    elseif #m[F.halts] > 0 then
      redis.call('ZADD', RETAIN, limit - 1, s)
      if asks then checks[#checks + 1] = { s, m[F.id], table.concat(m[F.halts], ' ') } end
    else
      remove(s, m)
      decided(m)
      bump('retention_dropped', 1)
      dropped = dropped + 1
    end
  end
  return #old == bound and dropped > 0
end

-- What time alone causes, up to a bound. Says whether there may be more. What is only to be forgotten is left to the sweep,
-- which `asks`.
local function tick(bound, asks)
  if closed then return false end
  local due = redis.call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, bound)
  for _, s in ipairs(due) do
    local m = load(s)
    -- An earlier one of its batch may have returned it.
    if m and m[F.until_ms] <= now then
      if m[F.state] == IS_HIDDEN then
        leave(s, m)
        enter(s, m, IS_READY)
      elseif m[F.state] == IN_FLIGHT then
        lapse(s, m)
      end
    end
  end
  local more = drop_old(bound, asks) or #due == bound
  if not asks then
    refresh_groups()
    return more
  end
  local forgotten = redis.call('ZRANGEBYSCORE', DEDUP_AT, '-inf', now - C.window, 'LIMIT', 0, bound)
  for _, hash in ipairs(forgotten) do
    redis.call('HDEL', DEDUP, hash)
    redis.call('ZREM', DEDUP_AT, hash)
  end
  local tried = redis.call('ZRANGEBYSCORE', TRIES_AT, '-inf', now - @ATTEMPT_ID_MS@, 'LIMIT', 0, bound)
  for _, attempt in ipairs(tried) do
    redis.call('HDEL', SIDE, 'a:' .. attempt)
    redis.call('ZREM', TRIES_AT, attempt)
  end
  refresh_groups()
  return more or #forgotten == bound or #tried == bound
end

-- The message of a receipt, or why there is none.
local function find(s, id, given)
  local m = load(s)
  if m and m[F.id] == id and m[F.state] == IN_FLIGHT and m[F.until_ms] <= now then
    -- Beyond what one tick looks at.
    lapse(s, m)
    m = load(s)
  end
  if not m or m[F.id] ~= id then return nil, 'gone' end
  if m[F.fence] ~= tonumber(given) then
    bump('stale', 1)
    return nil, 'stale'
  end
  if m[F.state] == IS_PARKED then
    if m[F.parked] == 'in-doubt' or m[F.parked] == 'damaged' then return nil, 'not-in-flight' end
    return nil, 'dead'
  end
  return m
end

-- WAIT counts the writes of its own connection. An answer that rests on the write of another one needs a write of its own.
local function answer(status, ...)
  refresh_groups()
  local changed = {}
  for name, by in pairs(deltas) do
    if by ~= 0 then
      changed[#changed + 1] = name
      changed[#changed + 1] = count(name)
    end
  end
  if #changed > 0 then redis.call('HSET', INFO, unpack(changed)) end
  if is_woken then wake('q', C.name) end
  if fence ~= last_fence then redis.call('HSET', META, 'fence', fence) end
  if ARGV[2] == '1' then redis.call('HINCRBY', META, 'touched', 1) end
  return { status, now, moves, checks, decisions, resumed, ... }
end

if C.revision ~= '*' then
  if not known[1] then return answer('missing') end
  if known[1] ~= C.revision then return answer('changed') end
end

