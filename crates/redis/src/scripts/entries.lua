-- Entries of the ledger, for the scripts of the ledger and for those of the queues that end claims or keep entries.
--
-- An entry is a MessagePack array. The scripts make the decisions of `hapax_core::ledger::protocol`; the conformance suite
-- checks them. The state of a held claim that has lapsed follows from the time. An entry is kept as long as a message needs
-- it: NEEDS has a member for each of them, `ENTRY QUEUE MESSAGE`.
local SCOPE, KEY, FENCE, NONCE, OWNER, FINGERPRINT, CLAIMED = 1, 2, 3, 4, 5, 6, 7
local TAKEOVERS, STAGE, LEASE, UNTIL, PARKS, VALUE, OMITTED = 8, 9, 10, 11, 12, 13, 14
local HELD, DOUBTED, COMPLETED, FAILED = 0, 1, 2, 3
local HOUR_MS = 3600000
local written, resumed = false, {}

-- A hint for those who wait for a key (`c`) or for messages of a queue (`q`), on the channel of the shard: other processes hear
-- there what may be worth a look. It may be lost: they look by themselves too.
local function wake(kind, name)
  local WAKE = string.sub(META, 1, -5) .. 'wake'
  redis.call('SPUBLISH', WAKE, kind .. ' ' .. name)
end

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

-- The name of an entry is the last part of its key.
local function member_of(entry)
  return string.match(entry, '[^:]*$')
end

-- Writes an entry, or removes it (nil), with its indexes. `before` is what the indexes say so far.
local function write_entry(entry, scope, before, e)
  local member, after = member_of(entry), indexed(e)
  if e then redis.call('SET', entry, cmsgpack.pack(e)) else redis.call('DEL', entry) end
  if after.fence and after.fence ~= before.fence then
    redis.call('ZADD', ENTRIES, string.format('%d', after.fence), member)
  elseif not after.fence and before.fence then
    redis.call('ZREM', ENTRIES, member)
  end
  if after.open and after.fence ~= before.fence then
    redis.call('ZADD', OPEN, string.format('%d', after.fence), member)
  elseif before.open and not after.open then
    redis.call('ZREM', OPEN, member)
  end
  if after.due then
    redis.call('ZADD', ENTRIES_DUE, string.format('%d', after.due), member)
  elseif before.due then
    redis.call('ZREM', ENTRIES_DUE, member)
  end
  count_scope('open ', scope, one_if(after.open) - one_if(before.open))
  count_scope('doubt ', scope, one_if(after.in_doubt) - one_if(before.in_doubt))
  written = true
end

local function is_needed(member)
  return #redis.call('ZRANGEBYLEX', NEEDS, '(' .. member .. ' ', '(' .. member .. '!', 'LIMIT', 0, 1) > 0
end

-- The message of a queue needs an entry from now on, or no longer.
local function begin_need(member, queue, id)
  redis.call('ZADD', NEEDS, 0, member .. ' ' .. queue .. ' ' .. id)
end

local function end_need(member, queue, id)
  redis.call('ZREM', NEEDS, member .. ' ' .. queue .. ' ' .. id)
  -- The sweep looks whether its time is over.
  if not is_needed(member) then redis.call('ZADD', ENTRIES_DUE, 'XX', 'LT', now, member) end
end

-- The entry and what the indexes say about it; nil: there is none. One whose time is over is removed, unless a message needs
-- it. The third value counts removed entries. After a restart of the server an open claim gets a full lease.
local function load_entry(entry)
  local raw = redis.call('GET', entry)
  if not raw then return nil, {}, 0 end
  local fine, e = pcall(cmsgpack.unpack, raw)
  if not fine or type(e) ~= 'table' or #e ~= OMITTED then
    return error({ err = 'HAPAXDAMAGED the entry ' .. entry .. ' cannot be read' })
  end
  local before = indexed(e)
  if e[STAGE] == HELD and e[LEASE] > 0 then e[UNTIL] = math.max(e[UNTIL], boot + e[LEASE]) end
  local prune = prune_ms(e)
  if prune and prune <= now and not ledger_closed then
    if not is_needed(member_of(entry)) then
      write_entry(entry, e[SCOPE], before, nil)
      return nil, {}, 1
    end
    redis.call('ZADD', ENTRIES_DUE, now + HOUR_MS, member_of(entry))
  end
  return e, before, 0
end

-- Records that a lease has ended, before anyone is told: a restart of the server does not prolong it any more.
local function note_lapse(entry, e, before)
  if e[STAGE] == HELD and e[LEASE] > 0 and e[UNTIL] <= now and not ledger_closed then
    e[LEASE] = 0
    write_entry(entry, e[SCOPE], before, e)
  end
end

local function is_in_doubt(e)
  return e[STAGE] == DOUBTED or (e[STAGE] == HELD and e[UNTIL] <= now)
end

-- A doubt has ended: the messages that are parked for it continue. The caller releases them; until then it is written down.
local function resume(entry)
  local member = member_of(entry)
  if not is_needed(member) then return end
  redis.call('HSET', RESUMED, member, string.format('%.0f', now_us))
  resumed[#resumed + 1] = member
end

-- Ends a claim. Says how, how many entries were pruned, and whether anything has changed.
local function finish(entry, fence, nonce, ending, failed, value, omitted, ttl)
  local e, before, pruned = load_entry(entry)
  if not e then return 'gone', pruned, 0 end
  if e[FENCE] ~= fence or e[NONCE] ~= nonce then return 'stale', pruned, 0 end
  local stage, doubted = failed and FAILED or COMPLETED, is_in_doubt(e)
  if e[STAGE] >= COMPLETED then
    local same = ending == 'complete' and e[STAGE] == stage and e[VALUE] == value and e[OMITTED] == omitted
    return same and 'done' or 'ended', pruned, 0
  end
  if ending == 'complete' then
    e[STAGE], e[UNTIL], e[LEASE], e[VALUE], e[OMITTED] = stage, now, ttl, value, omitted
    write_entry(entry, e[SCOPE], before, e)
    wake('c', member_of(entry))
    if doubted then resume(entry) end
    return 'done', pruned, 1
  end
  if ending == 'release' then
    -- The holder declared that the effect may have happened, and cannot withdraw that.
    if e[STAGE] == DOUBTED then return 'stale', pruned, 0 end
    if e[TAKEOVERS] == 0 then
      write_entry(entry, e[SCOPE], before, nil)
      wake('c', member_of(entry))
      if doubted then resume(entry) end
      return 'done', pruned, 1
    end
    -- A release after a takeover says nothing about the earlier holder's effect: the entry stays in doubt.
  elseif e[STAGE] == DOUBTED then
    return 'done', pruned, 0
  end
  e[STAGE], e[UNTIL] = DOUBTED, math.min(now, e[UNTIL])
  write_entry(entry, e[SCOPE], before, e)
  wake('c', member_of(entry))
  return 'done', pruned, 1
end

