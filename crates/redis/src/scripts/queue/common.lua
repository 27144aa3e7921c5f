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
local LEASE_MAX = @LEASE_MS_MAX@

-- The settings as the caller knows them, with their revision: a MessagePack array that `queues/call.rs` writes.
local S = {
  revision = 1, name = 2, dead_letters = 3, fifo = 4, retention = 5, limit = 6, base = 7, cap = 8, jitter = 9, halts = 10,
  window = 11, messages_max = 12, bytes_max = 13, once = 14,
}
local C = cmsgpack.unpack(ARGV[5])

-- The counters of a queue, a MessagePack array. Those of the states follow each other, so that `N.ready + state` is one.
local N = {
  seq = 1, messages = 2, bytes = 3, noisy = 4, letters = 5, ready = 6, delayed = 7, in_flight = 8, parked = 9, sent = 10,
  duplicates = 11, delivered = 12, acked = 13, retried = 14, deferred = 15, expired = 16, dead = 17, stale = 18,
  retention_dropped = 19, damaged = 20,
}
local known = redis.call('HMGET', INFO, 'revision', 'pause', 'copy', 'counts')
local counts = known[4] and cmsgpack.unpack(known[4]) or { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
local is_counted, is_seeded, paused = false, false, (known[2] or '') ~= ''
-- Why the queue is closed for a copy to or from another store; nil: it is open. Time does not change a closed queue.
local closed = known[3] or nil
local touched, moves, checks, decisions = {}, {}, {}, 0
-- Whether messages became ready that others may wait for.
local is_woken = false
local fence = math.max(last_fence, tonumber(ARGV[4]))

-- Changes that are written together: a command with all its members for each key. `packed` has the messages that were read or
-- written; false: there is none.
local pending, packed = {}, {}

-- Writes what was collected for a key.
local function flush(key)
  local command = pending[key]
  if command then
    pending[key] = nil
    redis.call(unpack(command))
  end
end

-- A command on a key, behind what was collected for it.
local function call(command, key, ...)
  flush(key)
  return redis.call(command, key, ...)
end

-- A change of one member that may be written together with the next ones.
local function later(command, key, first, second)
  local list = pending[key]
  if list and (list[1] ~= command or #list > 1000) then
    flush(key)
    list = nil
  end
  if not list then
    list = { command, key }
    pending[key] = list
  end
  list[#list + 1] = first
  list[#list + 1] = second
end

local function bump(counter, by)
  counts[counter] = counts[counter] + by
  is_counted = true
end

local function next_fence()
  fence = math.max(fence + 1, now_us)
  return fence
end

local function next_seq()
  bump(N.seq, 1)
  return counts[N.seq]
end

-- A sequence number as a member of the sorted sets: the order of the texts is that of the numbers.
local function padded(number)
  return string.format('%016d', number)
end

-- Reads messages together that `load` is asked for afterwards.
local function prefetch(sequences)
  if #sequences < 2 then return end
  local raws = call('HMGET', M, unpack(sequences))
  for at, s in ipairs(sequences) do packed[s] = raws[at] end
end

local function write_message(s, m)
  local raw = cmsgpack.pack(m)
  packed[s] = raw
  later('HSET', M, s, raw)
end

-- Parks a message that cannot be read as damaged. Its place in the indexes says how it was counted, and its body is as it was;
-- its group, key and history are lost, so that it is not released.
local function set_aside(s, raw)
  local is_due, is_retained, state = call('ZSCORE', DUE, s), call('ZSCORE', RETAIN, s), IS_PARKED
  if is_due then
    state = is_retained and IS_HIDDEN or IN_FLIGHT
  elseif is_retained then
    state = IS_READY
  end
  bump(N.ready + state, -1)
  bump(N.parked, 1)
  bump(N.damaged, 1)
  later('ZREM', DUE, s)
  later('ZREM', RETAIN, s)
  if not C[S.fifo] then later('ZREM', READY, s) end
  -- The id may be readable. Otherwise it gets one, by which it can be discarded.
  local digits = string.rep('%x', 4)
  local id = string.match(raw, string.rep(digits, 2) .. string.rep('%-' .. digits, 4) .. string.rep(digits, 2))
  if not id or call('HGET', IDS, id) ~= s then
    id = string.format('00000000-0000-0000-0000-%012x', tonumber(s))
    later('HSET', IDS, id, s)
  end
  local sent, bytes = tonumber(call('ZSCORE', SENT, s) or now), math.max(call('HSTRLEN', B, s) - 4, 0)
  local problem = 'message ' .. s .. ' of queue ' .. C[S.name] .. ' cannot be read'
  local m = {
    id, IS_PARKED, 0, state == IN_FLIGHT and 1 or 0, 0, sent, sent, 0, 0, 0,
    '', 0, false, 0, 'damaged', problem, {}, false,
    0, 0, bytes, 0, '', id, 'm', {}, {}, 0,
  }
  write_message(s, m)
  return m
end

local function load(s)
  local raw = packed[s]
  if raw == nil then
    raw = redis.call('HGET', M, s)
    packed[s] = raw
  end
  if not raw then return nil end
  local fine, m = pcall(cmsgpack.unpack, raw)
  if fine and type(m) == 'table' and #m == FIELDS then return m end
  return set_aside(s, raw)
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
  if by == 1 and left == 30 then bump(N.noisy, 1) end
  if by == -1 and left == 29 then bump(N.noisy, -1) end
end

local function touch(m)
  if C[S.fifo] then touched[m[F.group]] = true end
end

-- Takes a message out of the indexes of its state.
local function leave(s, m)
  local state = m[F.state]
  bump(N.ready + state, -1)
  if state == IS_READY and not C[S.fifo] then later('ZREM', READY, s) end
  if state == IS_HIDDEN or state == IN_FLIGHT then later('ZREM', DUE, s) end
  if state == IS_READY or state == IS_HIDDEN then later('ZREM', RETAIN, s) end
  if state == IN_FLIGHT then count_flight(m, -1) end
  touch(m)
end

-- Brings a message that has left into a state, and writes it.
local function enter(s, m, state, until_ms)
  m[F.state], m[F.until_ms] = state, until_ms or 0
  bump(N.ready + state, 1)
  if state == IS_READY then is_woken = true end
  if state == IS_READY and not C[S.fifo] then
    -- Below 2^53: nine priorities of 2^49 each.
    later('ZADD', READY, (9 - m[F.priority]) * 562949953421312 + math.max(m[F.turn], tonumber(s)), s)
  end
  if state == IS_HIDDEN or state == IN_FLIGHT then later('ZADD', DUE, m[F.until_ms], s) end
  if state == IN_FLIGHT then count_flight(m, 1) end
  if state == IS_READY or state == IS_HIDDEN then later('ZADD', RETAIN, m[F.retained], s) end
  if C[S.fifo] and state == IS_PARKED then
    redis.call('ZREM', GROUPS, m[F.group] .. ' ' .. s)
  elseif C[S.fifo] then
    redis.call('ZADD', GROUPS, 0, m[F.group] .. ' ' .. s)
  end
  touch(m)
  write_message(s, m)
end

local function insert(s, m, body, state, until_ms)
  later('HSET', B, s, body)
  later('HSET', IDS, m[F.id], s)
  later('ZADD', ALL, s, s)
  later('ZADD', SENT, m[F.sent], s)
  if #m[F.halts] > 0 or #m[F.needs] > 0 then redis.call('HSET', WAITS, m[F.id], s) end
  bump(N.messages, 1)
  bump(N.bytes, m[F.bytes])
  if m[F.dead] then bump(N.letters, 1) end
  enter(s, m, state, until_ms)
end

local function remove(s, m)
  leave(s, m)
  later('ZREM', ALL, s)
  later('ZREM', SENT, s)
  if C[S.fifo] then redis.call('ZREM', GROUPS, m[F.group] .. ' ' .. s) end
  packed[s] = false
  later('HDEL', M, s)
  later('HDEL', B, s)
  later('HDEL', IDS, m[F.id])
  if #m[F.halts] > 0 or #m[F.needs] > 0 then redis.call('HDEL', WAITS, m[F.id]) end
  bump(N.messages, -1)
  bump(N.bytes, -m[F.bytes])
  if m[F.dead] then bump(N.letters, -1) end
end

-- A message needs an entry of the ledger, which is in this shard, from now on.
local function need(m, entry)
  local member = member_of(entry)
  m[F.needs][#m[F.needs] + 1] = C[S.name] .. ' ' .. member
  begin_need(member, C[S.name], m[F.id])
end

-- The message is gone, or was decided about. The groups that wait for it and the entries that it needs, in queues elsewhere,
-- are told by the caller, and until then it is written down here.
local function decided(m)
  local elsewhere = {}
  for _, queue in ipairs(m[F.halts]) do elsewhere[#elsewhere + 1] = queue end
  for _, known_need in ipairs(m[F.needs]) do
    local queue, member = string.match(known_need, '^(%S+) (%S+)$')
    if queue == C[S.name] then
      end_need(member, queue, m[F.id])
    else
      elsewhere[#elsewhere + 1] = queue .. ':' .. member
    end
  end
  if #elsewhere == 0 then return end
  redis.call('HSET', DECIDED, m[F.id], table.concat(elsewhere, ' '))
  decisions = decisions + 1
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
  if not C[S.fifo] then return end
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
  if not C[S.halts] or m[F.group] == '' then return false end
  redis.call('HSET', SIDE, 'u:' .. m[F.id], m[F.group])
  redis.call('ZADD', HALTED, 0, m[F.group] .. ' ' .. m[F.id])
  put_back_later(s, m)
  touch(m)
  return true
end

-- A damaged message does not know its group: it leaves the order of the group in which it is found, which is halted for it
-- where the queue says so. `received` says that it was in flight.
local function leave_group(s, m, group)
  redis.call('ZREM', GROUPS, group .. ' ' .. s)
  if not m then return end
  m[F.group] = group
  if m[F.received] > 0 then count_flight(m, -1) end
  m[F.received] = 0
  write_message(s, m)
  touched[group] = true
  halt(s, m)
end

-- The heads of the groups that were changed: a group is ready if its first message is, and it is not halted.
local function refresh_groups()
  for group in pairs(touched) do
    local from, to = group_range(group)
    local m, s, is_strange
    repeat
      local head = redis.call('ZRANGEBYLEX', GROUPS, from, to, 'LIMIT', 0, 1)[1]
      s = head and string.sub(head, #group + 2)
      m = s and load(s)
      is_strange = s and not (m and m[F.group] == group)
      if is_strange then leave_group(s, m, group) end
    until not is_strange
    if not s then redis.call('HDEL', SIDE, 't:' .. group, 'h:' .. group) end
    if m and m[F.state] == IS_READY and not is_halted(group) then
      local turn = tonumber(redis.call('HGET', SIDE, 't:' .. group) or 0)
      call('ZADD', READY, math.max(turn, tonumber(s)), group)
      is_woken = true
    else
      call('ZREM', READY, group)
    end
  end
  touched = {}
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
  local body = call('HGET', B, s)
  remove(s, m)
  local number = next_fence()
  local move = string.format('%s %.0f', C[S.name], number)
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
    if string.sub(move, 1, #C[S.name] + 1) == C[S.name] .. ' ' then count = count + 1 end
  end
  return count
end

local function die(s, m, cause, problem)
  bump(N.dead, 1)
  local halted = halt(s, m)
  if C[S.dead_letters] == '-' then
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
  out[F.dead] = { C[S.name], cause, last or false, m[F.attempts], m[F.deliveries], m[F.first], now }
  out[F.died_at], out[F.attempts] = tonumber(s), 0
  if halted then out[F.halts][#out[F.halts] + 1] = C[S.name] end
  return 'moving', set_moving(s, m, out, C[S.dead_letters], 'dead')
end

-- Makes a message visible behind the ready ones, and moves its FIFO group behind the other groups.
local function put_back(s, m, after)
  leave(s, m)
  m[F.turn] = next_seq()
  if C[S.fifo] then redis.call('HSET', SIDE, 't:' .. m[F.group], m[F.turn]) end
  if after == 0 then enter(s, m, IS_READY) else enter(s, m, IS_HIDDEN, now + after) end
end

local function delay(attempt)
  local ceiling = math.min(C[S.base] * 2 ^ math.max(attempt - 1, 0), C[S.cap] == 0 and LEASE_MAX or C[S.cap])
  if not C[S.jitter] then return ceiling end
  if not is_seeded then
    -- Redis gives each script the same numbers otherwise.
    math.randomseed(tonumber(ARGV[3]))
    math.random()
    is_seeded = true
  end
  return math.floor(math.random() * (ceiling + 1))
end

-- By policy a failed delivery is retried, or its message dies.
local function fail(s, m, cause, problem, asked)
  remember(m, cause, problem)
  if C[S.limit] > 0 and m[F.attempts] >= C[S.limit] then return die(s, m, cause, problem) end
  local after = math.min(asked or delay(m[F.attempts]), LEASE_MAX)
  put_back(s, m, after)
  return 'returned', after
end

local function lapse(s, m)
  bump(N.expired, 1)
  if m[F.own] == 0 then put_back_later(s, m, true) end
  fail(s, m, 'expired', nil, nil)
end

-- The time from which the retention of a message counts: what a halted group has kept beyond it has it again from the time
-- at which the group has continued.
local function retained_from(m)
  if m[F.group] == '' then return m[F.retained] end
  local continued = tonumber(redis.call('HGET', SIDE, 'h:' .. m[F.group]) or 0)
  return m[F.retained] + C[S.retention] < continued and continued or m[F.retained]
end

-- Drops messages whose retention is over. One that a group elsewhere may wait for stays, behind the others that are too old;
-- with `asks`, the caller finds out whether one does.
local function drop_old(bound, asks)
  local limit = now - C[S.retention]
  local old = call('ZRANGEBYSCORE', RETAIN, '-inf', string.format('(%.0f', limit), 'LIMIT', 0, bound)
  local dropped = 0
  for _, s in ipairs(old) do
    local m = load(s)
    if m[F.state] == IS_PARKED then
      -- It was found to be damaged.
    elseif m[F.retained] >= limit then
      later('ZADD', RETAIN, m[F.retained], s)
    elseif m[F.group] ~= '' and is_halted(m[F.group]) then
      -- It is looked at again after a whole retention.
      later('ZADD', RETAIN, now, s)
    elseif retained_from(m) >= limit then
      later('ZADD', RETAIN, retained_from(m), s)
    elseif #m[F.halts] > 0 then
      later('ZADD', RETAIN, limit - 1, s)
      if asks then checks[#checks + 1] = { s, m[F.id], table.concat(m[F.halts], ' ') } end
    else
      remove(s, m)
      decided(m)
      bump(N.retention_dropped, 1)
      dropped = dropped + 1
    end
  end
  return #old == bound and dropped > 0
end

-- What time alone causes, up to a bound. Says whether there may be more. What is only to be forgotten is left to the sweep,
-- which `asks`.
local function tick(bound, asks)
  if closed then return false end
  local due = call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, bound)
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
  local forgotten = redis.call('ZRANGEBYSCORE', DEDUP_AT, '-inf', now - C[S.window], 'LIMIT', 0, bound)
  for _, hash in ipairs(forgotten) do
    redis.call('HDEL', DEDUP, hash)
    redis.call('ZREM', DEDUP_AT, hash)
  end
  local tried = redis.call('ZRANGEBYSCORE', TRIES_AT, '-inf', now - @ATTEMPT_ID_MS@, 'LIMIT', 0, bound)
  for _, attempt in ipairs(tried) do
    redis.call('HDEL', SIDE, attempt)
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
    bump(N.stale, 1)
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
  for _, command in pairs(pending) do redis.call(unpack(command)) end
  if is_counted then redis.call('HSET', INFO, 'counts', cmsgpack.pack(counts)) end
  if is_woken then wake('q', C[S.name]) end
  if fence ~= last_fence then redis.call('HSET', META, 'fence', fence) end
  if ARGV[2] == '1' then redis.call('HINCRBY', META, 'touched', 1) end
  return { status, now, moves, checks, decisions, resumed, ... }
end

if C[S.revision] ~= '*' then
  if not known[1] then return answer('missing') end
  if known[1] ~= C[S.revision] then return answer('changed') end
end

