#!lua
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits entry
-- ARGV: clock touch seed floor settings source move number kind old_id message body entry
-- A message from another queue, once. What has arrived, or found no queue, is remembered until its source has ended the move
-- (`kind` is then `forget` and `number` the one below which all moves of that shard have ended). A caller that was slow may
-- come after that: the number tells it from a new move, and a move is remembered until the number is beyond it. `entry` is 1
-- for a redriven message, whose entry is the last key.
local source, move, number, kind = 'floor ' .. ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9]
local ended = tonumber(redis.call('HGET', META, source) or 0)
if kind == 'forget' then
  if number > ended then redis.call('HSET', META, source, number) end
  if tonumber(string.match(move, '%S+$')) < math.max(number, ended) then redis.call('HDEL', ARRIVED, move) end
  return answer('done')
end
if number < ended then return answer('done') end
-- What dies while everything is being closed for a copy is copied too.
if closed and string.sub(closed, 1, 3) ~= 'to ' then return answer('closed', closed) end
local before = redis.call('HGET', ARRIVED, move)
if before then return answer(before) end
if not known[1] then
  redis.call('HSET', ARRIVED, move, 'missing')
  return answer('missing')
end
redis.call('HSET', ARRIVED, move, 'done')
local m = cmsgpack.unpack(ARGV[11])
-- Its next delivery has a larger fence than its last one.
fence = math.max(fence, m[F.fence])
local place = next_seq()
if kind == 'dead' then
  if C[S.fifo] then m[F.retained] = now end
else
  local was_awaited = unhalt(ARGV[10])
  if was_awaited and m[F.dead][1] == C[S.name] then place = m[F.died_at] end
  -- The entry of its key in this queue is kept for it, also beyond its time. A failure is not, or it would be replayed.
  local old = m[F.needs]
  m[F.needs] = {}
  if ARGV[13] == '1' and (C[S.once] or #old > 0) then
    local entry = KEYS[33]
    need(m, entry)
    local e, indexes = load_entry(entry)
    if e and e[STAGE] == FAILED then write_entry(entry, e[SCOPE], indexes, nil) end
  end
  for _, known_need in ipairs(old) do
    local queue, member = string.match(known_need, '^(%S+) (%S+)$')
    if queue == C[S.name] then end_need(member, queue, ARGV[10]) end
  end
  m[F.dead], m[F.died_at], m[F.attempts], m[F.deliveries], m[F.history] = false, 0, 0, 0, {}
  m[F.sent], m[F.retained], m[F.halts] = now, now, {}
end
m[F.received_ms], m[F.received], m[F.own], m[F.turn], m[F.first], m[F.visible] = 0, 0, 0, 0, 0, 0
insert(padded(place), m, ARGV[12], IS_READY)
return answer('done')
