#!lua
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits entry...
-- ARGV: clock touch seed floor settings element...
-- Takes over what another store has exported; what was taken over before is left as it is. Each element has a kind and a name. A
-- `message` is a JSON array and a body, and the place of its own entry among the keys that follow the queue's, or 0; a
-- `dedup` id has its hash, id and time. `place` gives a place, `halt` halts a group: group and id.
if closed and string.sub(closed, 1, 5) ~= 'from ' then return answer('closed', closed) end
local answers, refused = {}, {}

-- What was imported is remembered, so that a repeated import does not add it again: as long as the queue is closed for the
-- copy, and for the time that what was imported is kept while it is open.
local function remember_import(id)
  redis.call('HSET', SIDE, 'i:' .. id, '')
  redis.call('ZADD', TRIES_AT, now + @IMPORTED_MS_MIN@ - @ATTEMPT_ID_MS@, 'i:' .. id)
end

local function import_message(id, fields, body, own)
  if redis.call('HEXISTS', SIDE, 'i:' .. id) == 1 or call('HEXISTS', IDS, id) == 1 then return 'there', 0 end
  local m = cjson.decode(fields)
  local group = C[S.fifo] and m[F.group]
  if group and refused[group] then return 'order', 0 end
  local messages, used = counts[N.messages], counts[N.bytes]
  local full = (C[S.messages_max] >= 0 and messages >= C[S.messages_max] and 'messages')
    or (C[S.bytes_max] >= 0 and used + m[F.bytes] > C[S.bytes_max] and 'bytes')
  if full then
    if group then refused[group] = true end
    return full, full == 'messages' and messages or used
  end
  local s = padded(next_seq())
  -- What will need a message that is over, for example a group that waits for it, may come later.
  m[F.retained] = math.max(m[F.retained], now + math.min(C[S.retention], @IMPORTED_MS_MIN@) - C[S.retention])
  if own > 0 then
    load_entry(KEYS[@KEYS@ + own])
    need(m, KEYS[@KEYS@ + own])
  end
  fence = math.max(fence, m[F.fence])
  local state, until_ms = m[F.state], m[F.visible]
  -- `until` says whether a parked message halts its group.
  local halts = m[F.until_ms] == 1
  if state ~= IS_PARKED then state = until_ms > now and IS_HIDDEN or IS_READY end
  insert(s, m, body, state, state == IS_HIDDEN and until_ms or 0)
  if halts then
    redis.call('HSET', SIDE, 'u:' .. id, m[F.group])
    redis.call('ZADD', HALTED, 0, m[F.group] .. ' ' .. id)
    touch(m)
  end
  remember_import(id)
  return 'added', tonumber(s)
end

local function import_dedup(hash, id, sent)
  if now >= sent + C[S.window] then return 'there', 0 end
  local first = redis.call('HGET', DEDUP, hash)
  if first and now < tonumber(string.match(first, '^%S+')) + C[S.window] then return 'there', 0 end
  local s = call('HGET', IDS, id)
  redis.call('HSET', DEDUP, hash, string.format('%.0f %s %.0f', sent, id, s and tonumber(s) or next_seq()))
  redis.call('ZADD', DEDUP_AT, sent, hash)
  return 'added', 0
end

for at = 6, #ARGV, 5 do
  local kind, name, status, number = ARGV[at], ARGV[at + 1], 'there', 0
  if kind == 'message' then
    status, number = import_message(name, ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4]))
  elseif kind == 'dedup' then
    status, number = import_dedup(name, ARGV[at + 2], tonumber(ARGV[at + 3]))
  elseif redis.call('HEXISTS', SIDE, 'i:' .. name) == 0 then
    status, number = 'added', next_seq()
    if kind == 'halt' then
      remember_import(name)
      redis.call('HSET', SIDE, 'u:' .. ARGV[at + 3], ARGV[at + 2])
      redis.call('ZADD', HALTED, 0, ARGV[at + 2] .. ' ' .. ARGV[at + 3])
      touched[ARGV[at + 2]] = true
    end
  end
  answers[#answers + 1] = { status, number }
end
return answer('done', answers)
