-- Shared by all scripts of the ledger; it stands in front of each of them.

local function next_fence()
  local fence = math.max(last_fence + 1, now_us)
  redis.call('HSET', META, 'fence', fence)
  if last_fence == 0 then redis.call('HSET', META, 'layout', @LAYOUT@) end
  return fence
end

-- WAIT counts the writes of its own connection. An answer that rests on the write of another one needs a write of its
-- own, or it would be confirmed although that one is not.
local function answer(status, pruned, ...)
  if not written and ARGV[2] == '1' then redis.call('HINCRBY', META, 'touched', 1) end
  return { status, now, pruned, resumed, ... }
end

local function closed()
  return answer('closed', 0, ledger_closed)
end

