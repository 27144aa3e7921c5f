#!lua
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits entry...
-- ARGV: clock touch seed floor settings element...
-- Each element: id, body, bytes, delay_ms, deliver_at_ms, group, dedup id, its hash, priority, key, source of the key. In a queue
-- whose handlers make claims, there is a key for each of them: the entry of its idempotency key.
if closed then return answer('closed', closed) end
-- An entry whose time is over is gone, so that the message does not bring it back. All are looked at before anything is added:
-- one that cannot be read ends the script.
for at = @KEYS@ + 1, C[S.once] and #KEYS or 0 do load_entry(KEYS[at]) end
local answers = {}
for at = 6, #ARGV, 11 do
  local id, body, bytes, hash = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 7]
  local delay_ms, deliver_at = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local first, told = hash ~= '' and redis.call('HGET', DEDUP, hash), nil
  if first then
    local sent_ms, sent_id, sent_seq = string.match(first, '^(%S+) (%S+) (%S+)$')
    if now < tonumber(sent_ms) + C[S.window] then
      bump(N.duplicates, 1)
      told = { 'duplicate', sent_id, tonumber(sent_seq) }
    end
  end
  local messages, used = counts[N.messages], counts[N.bytes]
  if told then
    -- Nothing is added.
  elseif deliver_at >= 0 and deliver_at > now + @DELIVER_AHEAD_MS_MAX@ then
    told = { 'ahead', '', now }
  elseif C[S.messages_max] >= 0 and messages >= C[S.messages_max] then
    told = { 'messages', '', messages }
  elseif C[S.bytes_max] >= 0 and used + bytes > C[S.bytes_max] then
    told = { 'bytes', '', used }
  else
    local number, due, retained = next_seq(), now + math.max(delay_ms, 0), now
    if deliver_at >= 0 then
      due = math.max(deliver_at, now)
      retained = due
    end
    local s = padded(number)
    local m = {
      id, IS_READY, 0, 0, 0, now, retained, 0, 0, 0,
      ARGV[at + 5], tonumber(ARGV[at + 8]), false, 0, false, false, {}, false,
      0, 0, bytes, 0, ARGV[at + 6], ARGV[at + 9], ARGV[at + 10], {}, {}, 0,
    }
    if C[S.once] then
      local entry = KEYS[@KEYS@ + 1 + (at - 6) / 11]
      need(m, entry)
    end
    if due > now then insert(s, m, body, IS_HIDDEN, due) else insert(s, m, body, IS_READY) end
    if hash ~= '' and C[S.window] > 0 then
      redis.call('HSET', DEDUP, hash, string.format('%.0f %s %.0f', now, id, number))
      redis.call('ZADD', DEDUP_AT, now, hash)
    end
    bump(N.sent, 1)
    told = { 'sent', id, number }
  end
  answers[#answers + 1] = told
end
return answer('done', answers)
