-- Shared by all scripts of the ledger and of the queues, behind the names of their keys.
local now_us
if ARGV[1] ~= '' then
  now_us = tonumber(ARGV[1])
else
  local time = redis.call('TIME')
  now_us = time[1] * 1000000 + time[2]
end
local now = math.floor(now_us / 1000)
local meta = redis.call('HMGET', META, 'fence', 'boot', 'closed')
local last_fence, boot = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
-- Why the ledger is closed for a copy to or from another store; nil: it is open. Time does not change a closed ledger.
local ledger_closed = meta[3] or nil

