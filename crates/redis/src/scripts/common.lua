-- Shared by all scripts of the ledger; it stands in front of each of them.
--
-- An entry is a MessagePack array. The scripts make the decisions of `hapax_core::ledger::protocol`; the conformance suite
-- checks them. The state of a held claim that has lapsed follows from the time.
local META, ALL, OPEN, DUE, SCOPES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local SCOPE, KEY, FENCE, NONCE, OWNER, FINGERPRINT, CLAIMED = 1, 2, 3, 4, 5, 6, 7
local TAKEOVERS, STAGE, LEASE, UNTIL, PARKS, VALUE, OMITTED = 8, 9, 10, 11, 12, 13, 14
local HELD, DOUBTED, COMPLETED, FAILED = 0, 1, 2, 3

local now_us
if ARGV[1] ~= '' then
  now_us = tonumber(ARGV[1])
else
  local time = redis.call('TIME')
  now_us = time[1] * 1000000 + time[2]
end
local now = math.floor(now_us / 1000)
local known = redis.call('HMGET', META, 'fence', 'boot')
local last_fence, boot = tonumber(known[1] or 0), tonumber(known[2] or 0)
local written = false

-- When an entry may be pruned; nil: not before an operator decides.
local function prune_ms(e)
  if e[STAGE] >= COMPLETED then return e[UNTIL] + e[LEASE] end
  if e[PARKS] == 1 then return nil end
  return e[UNTIL] + @DOUBT_RETENTION_MS@
end

-- What the indexes say about an entry. A lease of 0 records that the lapse was noted.
local function indexed(e)
  if not e then return {} end
  local due = prune_ms(e)
  if e[STAGE] == HELD and e[LEASE] > 0 then due = e[UNTIL] end
  local open = e[STAGE] < COMPLETED
  local in_doubt = e[STAGE] == DOUBTED or (e[STAGE] == HELD and e[LEASE] == 0)
  return { fence = e[FENCE], due = due, open = open, in_doubt = in_doubt }
end

local function count_scope(kind, scope, by)
  if by ~= 0 and redis.call('HINCRBY', SCOPES, kind .. scope, by) <= 0 then
    redis.call('HDEL', SCOPES, kind .. scope)
  end
end

local function one_if(condition)
  if condition then return 1 else return 0 end
end

-- Writes an entry, or removes it (nil), with its indexes. `before` is what the indexes say so far.
local function write(key, member, scope, before, e)
  local after = indexed(e)
  if e then redis.call('SET', key, cmsgpack.pack(e)) else redis.call('DEL', key) end
  if after.fence and after.fence ~= before.fence then
    redis.call('ZADD', ALL, after.fence, member)
  elseif not after.fence and before.fence then
    redis.call('ZREM', ALL, member)
  end
  if after.open and after.fence ~= before.fence then
    redis.call('ZADD', OPEN, after.fence, member)
  elseif before.open and not after.open then
    redis.call('ZREM', OPEN, member)
  end
  if after.due then
    redis.call('ZADD', DUE, after.due, member)
  elseif before.due then
    redis.call('ZREM', DUE, member)
  end
  count_scope('open ', scope, one_if(after.open) - one_if(before.open))
  count_scope('doubt ', scope, one_if(after.in_doubt) - one_if(before.in_doubt))
  written = true
end

-- The entry and what the indexes say about it; nil: there is none. One whose time is over is removed. The third value
-- counts removed entries. After a restart of the server an open claim gets a full lease.
local function load(key, member)
  local raw = redis.call('GET', key)
  if not raw then return nil, {}, 0 end
  local fine, e = pcall(cmsgpack.unpack, raw)
  if not fine or type(e) ~= 'table' or #e ~= OMITTED then
    return error({ err = 'HAPAXDAMAGED the entry ' .. key .. ' cannot be read' })
  end
  local before = indexed(e)
  if e[STAGE] == HELD and e[LEASE] > 0 then e[UNTIL] = math.max(e[UNTIL], boot + e[LEASE]) end
  local prune = prune_ms(e)
  if prune and prune <= now then
    write(key, member, e[SCOPE], before, nil)
    return nil, {}, 1
  end
  return e, before, 0
end

-- Records that a lease has ended, before anyone is told: a restart of the server does not prolong it any more.
local function note_lapse(key, member, e, before)
  if e[STAGE] == HELD and e[LEASE] > 0 and e[UNTIL] <= now then
    e[LEASE] = 0
    write(key, member, e[SCOPE], before, e)
  end
end

local function is_in_doubt(e)
  return e[STAGE] == DOUBTED or (e[STAGE] == HELD and e[UNTIL] <= now)
end

local function next_fence()
  local fence = math.max(last_fence + 1, now_us)
  redis.call('HSET', META, 'fence', fence)
  return fence
end

-- WAIT counts the writes of its own connection. An answer that rests on the write of another one needs a write of its
-- own, or it would be confirmed although that one is not.
local function answer(...)
  if not written and ARGV[2] == '1' then redis.call('HINCRBY', META, 'touched', 1) end
  return { ... }
end

