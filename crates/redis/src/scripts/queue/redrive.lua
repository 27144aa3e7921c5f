#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings how id task cursor ends element...
-- Redrives out of this queue. A task is kept as its state, its numbers and its description. `list` lists all of this shard,
-- or those that are `running`.
local how, id = ARGV[6], ARGV[7]

local function read(number)
  local raw = redis.call('HGET', REDRIVES, number)
  return raw and cmsgpack.unpack(raw)
end

-- 1 queue, 2 state, 3 started, 4 ended (0: not), 5 total, 6 moved, 7 left, 8 cursor, 9 last, 10 description, 11 failure
local function write(number, task)
  redis.call('HSET', REDRIVES, number, cmsgpack.pack(task))
end

if closed and (how == 'start' or how == 'step') then return answer('closed', closed) end
if how == 'start' then
  tick(100)
  local running = redis.call('HGET', INFO, 'redrive')
  if running and (read(running) or {})[2] == 'running' then return answer('running') end
  local number = string.format('%.0f', redis.call('HINCRBY', META, 'redrives', 1) * 64 + tonumber(ARGV[9]))
  local last = call('ZRANGE', ALL, -1, -1, 'WITHSCORES')[2]
  local task = { C[S.name], 'running', now, 0, counts[N.letters], 0, 0, 0, tonumber(last or 0), ARGV[8], '' }
  write(number, task)
  redis.call('HSET', INFO, 'redrive', number)
  -- As many are kept to be listed.
  local old = string.format('%.0f', tonumber(number) - @REDRIVES_KEPT@ * 64)
  if (read(old) or {})[2] ~= 'running' then redis.call('HDEL', REDRIVES, old) end
  return answer('done', { number, task })
end
if how == 'list' then
  local found = {}
  local all = redis.call('HGETALL', REDRIVES)
  for at = 1, #all, 2 do
    local task = cmsgpack.unpack(all[at + 1])
    if ARGV[8] ~= 'running' or task[2] == 'running' then found[#found + 1] = { all[at], task } end
  end
  return answer('done', found)
end
local task = read(id)
if not task then return answer('none') end
if how == 'cancel' then
  if task[2] == 'running' then task[2], task[4] = 'cancelled', now end
  write(id, task)
  return answer('done', { id, task })
end
if task[2] ~= 'running' then return answer('done', { id, task }) end
-- `fail` says in `task` why it cannot go on.
if not known[1] or how == 'fail' then
  task[2], task[4], task[11] = 'failed', now, how == 'fail' and ARGV[8] or 'queue ' .. C[S.name] .. ' was deleted'
  write(id, task)
  return answer('done', { id, task })
end
-- A step from the cursor that the caller has read. Each element: sequence, new id, target, name of its entry there; no target:
-- it is left.
tick(100)
if task[8] ~= tonumber(ARGV[9]) then return answer('done', { id, task }) end
for at = 11, #ARGV, 4 do
  local s, target = padded(tonumber(ARGV[at])), ARGV[at + 2]
  local m = load(s)
  if target ~= '' and m and m[F.dead] and (m[F.state] == IS_READY or m[F.state] == IS_HIDDEN) then
    local elsewhere = {}
    for _, queue in ipairs(m[F.halts]) do
      if queue ~= target then elsewhere[#elsewhere + 1] = queue end
    end
    for _, known_need in ipairs(m[F.needs]) do
      local queue, member = string.match(known_need, '^(%S+) (%S+)$')
      if queue ~= target then elsewhere[#elsewhere + 1] = queue .. ':' .. member end
    end
    -- The queue that it returns to is told when it arrives, the others after that.
    local out = cmsgpack.unpack(cmsgpack.pack(m))
    out[F.id] = ARGV[at + 1]
    set_moving(s, m, out, target, 'redrive ' .. id, ARGV[at + 3], table.concat(elsewhere, ' '))
    task[6] = task[6] + 1
  elseif target ~= '' or (m and m[F.dead]) then
    task[7] = task[7] + 1
  end
  task[8] = tonumber(ARGV[at])
end
-- It has ended when the last letter has arrived, not when it has left; the next step asks again.
if ARGV[10] == 'end' and count_moving() == 0 then
  task[2], task[4], task[7] = 'completed', now, math.max(task[5] - task[6], 0)
end
write(id, task)
return answer('done', { id, task })
