#!lua
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings how config expected interval_ms by pause
-- `copy` closes the queue for a copy, or opens it: `config` says why it is closed, `expected` is its pause so far, `pause` the new
-- one.
local how, config = ARGV[6], ARGV[7]
local found = redis.call('HMGET', INFO, 'revision', 'config', 'created', 'modified', 'pause', 'purged')

local function told(status, ...)
  return answer(status, found[1] or '', found[2] or '', tonumber(found[3] or 0), tonumber(found[4] or 0), found[5] or '', ...)
end

local function write(created)
  local revision = string.format('%.0f', redis.call('HINCRBY', META, 'queue_revision', 1))
  redis.call('HSET', INFO, 'revision', revision, 'config', config, 'created', created, 'modified', now)
  found[1], found[2], found[3], found[4] = revision, config, created, now
end

if how == 'get' then
  if not found[1] then return answer('missing') end
  return told('done')
end
if how == 'create' then
  if ledger_closed then return answer('ledger-closed', ledger_closed) end
  if found[1] then return told('exists') end
  local deleted = tonumber(redis.call('ZSCORE', DELETED, C[S.name]) or 0)
  local interval = tonumber(ARGV[9])
  if deleted > 0 and deleted + interval > now then return told('too-soon', deleted + interval - now) end
  redis.call('ZREMRANGEBYSCORE', DELETED, '-inf', now - @INTERVAL_MS_MAX@)
  redis.call('ZADD', QUEUES, 0, C[S.name])
  redis.call('HSET', META, 'layout', @LAYOUT@)
  write(now)
  return told('created')
end
if not found[1] then return answer('missing') end
if how == 'copy' then
  if (found[5] or '') ~= ARGV[8] then return told('conflict') end
  for name, value in pairs({ pause = ARGV[11], copy = config }) do
    if value == '' then redis.call('HDEL', INFO, name) else redis.call('HSET', INFO, name, value) end
  end
  redis.call('XADD', AUDIT, 'MAXLEN', '~', 10000, '*', 'at_ms', now, 'by', ARGV[10], 'what', 'copy of queue ' .. C[S.name])
  is_woken = true
  return told('done')
end
if closed then return answer('closed', closed) end
if how == 'set' then
  if ARGV[8] ~= '' and ARGV[8] ~= found[1] then return told('conflict') end
  if found[2] ~= config then write(tonumber(found[3])) end
  return told('done')
end
is_woken = true
if how == 'pause' then
  if (found[5] or '') == '' then redis.call('HSET', INFO, 'pause', string.format('%.0f ', now) .. ARGV[11]) end
else
  redis.call('HDEL', INFO, 'pause')
end
redis.call('XADD', AUDIT, 'MAXLEN', '~', 10000, '*', 'at_ms', now, 'by', ARGV[10], 'what', how .. ' queue ' .. C[S.name])
return told('done')
