-- Health of a resource of stoker.dev for Argo CD, of every kind: conditions as kstatus reads them, and the phases in
-- which nothing runs because the spec asks for it.
local function condition(name)
  for _, found in ipairs((obj.status or {}).conditions or {}) do
    if found.type == name then
      return found
    end
  end
  return {}
end

local status = obj.status or {}
local ready, stalled = condition("Ready"), condition("Stalled")
local message = status.message or ready.message or status.phase or "the operator has not seen it yet"

if obj.metadata.deletionTimestamp ~= nil then
  return { status = "Progressing", message = "is being deleted" }
end
if status.observedGeneration ~= nil and status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not seen the last change yet" }
end
if stalled.status == "True" then
  return { status = "Degraded", message = stalled.message or message }
end
if status.phase == "Suspended" or status.phase == "ScaledToZero" then
  return { status = "Suspended", message = message }
end
if ready.status == "True" then
  return { status = "Healthy", message = message }
end
return { status = "Progressing", message = message }
