#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings how move...
-- What is on its way out of this shard: `due` lists what a caller has left for this time, `take` reads it, `done` ends it,
-- `back` returns it to its queue, `parked` parks it there. An end tells the number below which all moves out of this shard
-- have ended. `told` forgets what was decided, and `resumed` that a doubt has ended, unless another one did since.
local how, answers = ARGV[6], {}

local function take(move, intent)
  answers[#answers + 1] = { move, intent[1], intent[2], intent[3], intent[5], redis.call('HGET', BODIES, move), intent[6] }
end

local function bring_back(move, intent)
  local m, body = cmsgpack.unpack(intent[5]), redis.call('HGET', BODIES, move)
  if how == 'parked' then
    local dead = m[F.dead]
    m[F.dead], m[F.parked], m[F.parked_error] = false, dead[2], dead[3]
    m[F.attempts] = dead[4]
    if m[F.halts][#m[F.halts]] == C.name then table.remove(m[F.halts]) end
    insert(intent[4], m, body, IS_PARKED)
  else
    m[F.id] = intent[3]
    insert(intent[4], m, body, IS_READY)
  end
end

if how == 'resumed' then
  if redis.call('HGET', RESUMED, ARGV[7]) == ARGV[8] then redis.call('HDEL', RESUMED, ARGV[7]) end
  return answer('done')
end
if how == 'due' then
  return answer('done', redis.call('ZRANGEBYSCORE', MOVES, '-inf', now_us - tonumber(ARGV[7]) * 1000, 'LIMIT', 0, 100))
end
for at = 7, #ARGV do
  local move = ARGV[at]
  local raw = redis.call('HGET', MOVING, move)
  local intent = raw and cmsgpack.unpack(raw)
  if how == 'told' then
    redis.call('HDEL', DECIDED, move)
  elseif how == 'take' then
    if intent then take(move, intent) end
  elseif intent then
    if how ~= 'done' and known[1] then bring_back(move, intent) end
    redis.call('ZREM', MOVES, move)
    redis.call('HDEL', MOVING, move)
    redis.call('HDEL', BODIES, move)
  end
end
local first = redis.call('ZRANGE', MOVES, 0, 0, 'WITHSCORES')[2]
return answer('done', answers, tonumber(first or fence + 1))
