#!lua flags=allow-oom
-- KEYS: meta all open due scopes entry
-- ARGV: clock touch member
local e, before, pruned = load(KEYS[6], ARGV[3])
if not e then return answer('absent', now, pruned) end
note_lapse(KEYS[6], ARGV[3], e, before)
return answer('entry', now, pruned, unpack(e))
