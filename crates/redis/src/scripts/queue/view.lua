#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings after limit state id
-- A page of messages in their order, with their bodies; or of one message.
tick(20)
local limit, state = tonumber(ARGV[7]), tonumber(ARGV[8])
local members = {}
if ARGV[9] ~= '' then
  members[1] = call('HGET', IDS, ARGV[9]) or nil
  if members[1] and tonumber(members[1]) <= tonumber(ARGV[6]) then members = {} end
else
  members = call('ZRANGEBYSCORE', ALL, '(' .. ARGV[6], '+inf', 'LIMIT', 0, 1000)
end
local rows, bytes, last, more = {}, 0, 0, #members == 1000
for _, s in ipairs(members) do
  local m = load(s)
  if state < 0 or m[F.state] == state then
    if #rows == limit or bytes > 8388608 then
      more = true
      break
    end
    m[F.retained] = retained_from(m)
    local body = call('HGET', B, s)
    bytes = bytes + #body
    rows[#rows + 1] = { tonumber(s), cmsgpack.pack(m), body }
  end
  last = tonumber(s)
end
return answer('done', rows, last, more and 1 or 0)
