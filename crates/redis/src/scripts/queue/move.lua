#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings how move...
-- What is on its way out of this shard: `due` lists what a caller has left for this time, behind a number; `take` reads it,
-- `done` ends it, `back` returns it to its queue, `parked` parks it there. An end tells the number below which all moves out
-- of this shard have ended. `told` forgets what was decided, and `resumed` that a doubt has ended, unless another one did
-- since.
local how, answers = ARGV[6], {}

local function take(move, intent)
  answers[#answers + 1] = { move, intent[1], intent[2], intent[3], intent[5], redis.call('HGET', BODIES, move), intent[6] }
end

-- A redrive has not moved it after all. One with a target of its own cannot move the others either.
local function count_back(intent)
  local number = string.match(intent[2], '^redrive (%S+)$')
  local raw = number and redis.call('HGET', REDRIVES, number)
  if not raw then return end
  local task = cmsgpack.unpack(raw)
  task[6], task[7] = task[6] - 1, task[7] + 1
  local target = cjson.decode(task[10]).to
  if type(target) == 'string' and task[2] ~= 'cancelled' then
    task[2], task[4], task[11] = 'failed', now, 'queue ' .. target .. ' was deleted'
  end
  redis.call('HSET', REDRIVES, number, cmsgpack.pack(task))
end

local function bring_back(move, intent)
  local m, body, s = cmsgpack.unpack(intent[5]), redis.call('HGET', BODIES, move), intent[4]
  count_back(intent)
  if not known[1] then
    -- It was deleted with its queue.
    m[F.id] = intent[3]
    decided(m)
    return
  end
  -- The queue may have been deleted and created again: the place is another message's then, or will be.
  if tonumber(s) > counts[N.seq] or call('HEXISTS', M, s) == 1 then s = padded(next_seq()) end
  if how == 'parked' then
    local dead = m[F.dead]
    m[F.dead], m[F.parked], m[F.parked_error] = false, dead[2], dead[3]
    m[F.attempts] = dead[4]
    if m[F.halts][#m[F.halts]] == C[S.name] then table.remove(m[F.halts]) end
    insert(s, m, body, IS_PARKED)
  else
    m[F.id] = intent[3]
    insert(s, m, body, IS_READY)
  end
end

if how == 'resumed' then
  if redis.call('HGET', RESUMED, ARGV[7]) == ARGV[8] then redis.call('HDEL', RESUMED, ARGV[7]) end
  return answer('done')
end
if how == 'due' then
  -- By the time in the intent: a number is a fence, which may be ahead of the clock. A clock that was set back hides nothing.
  local last = ''
  for _, move in ipairs(redis.call('ZRANGEBYSCORE', MOVES, '(' .. ARGV[8], '+inf', 'LIMIT', 0, 100)) do
    local age = now - cmsgpack.unpack(redis.call('HGET', MOVING, move))[8]
    if age >= tonumber(ARGV[7]) or age < 0 then answers[#answers + 1] = move end
    last = string.match(move, '%S+$')
  end
  return answer('done', answers, last)
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
    if how == 'done' and intent[7] ~= '' then
      redis.call('HSET', DECIDED, intent[3], intent[7])
      decisions = decisions + 1
    elseif how ~= 'done' then
      bring_back(move, intent)
    end
    redis.call('ZREM', MOVES, move)
    redis.call('HDEL', MOVING, move)
    redis.call('HDEL', BODIES, move)
  end
end
local first = redis.call('ZRANGE', MOVES, 0, 0, 'WITHSCORES')[2]
return answer('done', answers, tonumber(first or fence + 1))
