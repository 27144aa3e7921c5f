#!lua flags=allow-oom
-- KEYS: meta all open due scopes needs resumed entry
-- ARGV: clock touch
local e, before, pruned = load_entry(KEYS[8])
if not e then return answer('absent', pruned) end
note_lapse(KEYS[8], e, before)
return answer('entry', pruned, unpack(e))
