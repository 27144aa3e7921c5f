#!lua flags=allow-oom
-- KEYS: meta moves moving bodies decided arrived queues deleted redrives audit entries open entries_due scopes needs resumed info m b all ready due groups retain sent ids dedup dedup_at side tries_at halted waits
-- ARGV: clock touch seed floor settings drop...
-- Each element: the sequence of a message that is too old and that no group waits for.
for at = 6, closed and 0 or #ARGV do
  local m = load(ARGV[at])
  local waits = m and (m[F.state] == IS_READY or m[F.state] == IS_HIDDEN)
  if waits and m[F.retained] + C[S.retention] < now then
    remove(ARGV[at], m)
    decided(m)
    bump(N.retention_dropped, 1)
  end
end
return answer('done', tick(200, true) and 1 or 0)
