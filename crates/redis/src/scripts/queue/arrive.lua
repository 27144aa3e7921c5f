#!lua
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings source move number kind old_id message body
-- A message from another queue, once. What has arrived, or found no queue, is remembered until its source has ended the move
-- (`kind` is then `forget` and `number` the one below which all moves of that shard have ended). A caller that was slow may
-- come after that: the number tells it from a new move.
local source, move, number, kind = 'floor ' .. ARGV[6], ARGV[7], tonumber(ARGV[8]), ARGV[9]
local ended = tonumber(redis.call('HGET', META, source) or 0)
if kind == 'forget' then
  redis.call('HDEL', ARRIVED, move)
  if number > ended then redis.call('HSET', META, source, number) end
  return answer('done')
end
if number < ended then return answer('done') end
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
  if C.fifo then m[F.retained] = now end
else
  local was_awaited = unhalt(ARGV[10])
  if was_awaited and m[F.dead][1] == C.name then place = m[F.died_at] end
  m[F.dead], m[F.died_at], m[F.attempts], m[F.deliveries], m[F.history] = false, 0, 0, 0, {}
  m[F.sent], m[F.retained], m[F.halts] = now, now, {}
end
m[F.received_ms], m[F.received], m[F.own], m[F.turn], m[F.first] = 0, 0, 0, 0, 0
insert(padded(place), m, ARGV[12], IS_READY)
return answer('done')
