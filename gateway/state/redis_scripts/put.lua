-- Writes the next version of a document if the current version is the expected one.
--
-- KEYS: the versions of all documents; the history of this one.
-- ARGV: name; expected version (0: none yet); the entry; how many entries to keep.
-- Returns the version before the call.
local version = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
if version == tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], ARGV[1], version + 1)
  redis.call('RPUSH', KEYS[2], ARGV[3])
  redis.call('LTRIM', KEYS[2], -tonumber(ARGV[4]), -1)
end
return version
