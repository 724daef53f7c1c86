// Rates and quantiles between two answers of the counters. Pure.

/**
 * Traffic between two answers; null while there is one. A restarted router begins at zero: its counts are all new. Of
 * several routers one that restarted or went hides what the others counted, so nothing is said of that time.
 */
export function between(earlier, later) {
  if (!earlier?.traffic || !later?.traffic) return null;
  const seconds = (Date.parse(later.measured_at) - Date.parse(earlier.measured_at)) / 1000;
  if (!(seconds > 0)) return null;
  const fewer = Object.entries(earlier.traffic.requests).some(
    ([code, value]) => (later.traffic.requests[code] ?? 0) < value,
  );
  if (fewer && Math.max(earlier.routers, later.routers) > 1) return null;
  const requests = differences(earlier.traffic.requests, later.traffic.requests);
  const total = sum(Object.values(requests));
  const errors = sum(
    Object.entries(requests)
      .filter(([code]) => Number(code) >= 500)
      .map(([, value]) => value),
  );
  return {
    seconds,
    requestsPerSecond: total / seconds,
    errorsPerSecond: errors / seconds,
    firstByte: histogram([earlier.traffic.first_byte_seconds], [later.traffic.first_byte_seconds]),
    firstToken: histogram(loads(earlier), loads(later)),
  };
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const loads = (answer) => answer.engines.map((one) => one.load?.first_token_seconds ?? []);

function differences(before, after) {
  return Object.fromEntries(
    Object.entries(after).map(([name, value]) => [
      name,
      value < (before[name] ?? 0) ? value : value - (before[name] ?? 0),
    ]),
  );
}

/** Buckets of both answers, each summed over its sources, as what came between. */
function histogram(before, after) {
  const [old, now] = [total(before), total(after)];
  return [...now.entries()]
    .map(([bound, value]) => ({ bound, count: Math.max(0, value - (old.get(bound) ?? 0)) }))
    .sort((a, b) => a.bound - b.bound);
}

function total(sources) {
  const found = new Map();
  for (const buckets of sources)
    for (const { up_to: bound, count } of buckets) {
      const key = bound ?? Infinity;
      found.set(key, (found.get(key) ?? 0) + count);
    }
  return found;
}

/** A quantile of a histogram, linear inside its bucket; null without values. */
export function quantile(buckets, share) {
  const all = buckets.at(-1)?.count ?? 0;
  if (!all) return null;
  const wanted = share * all;
  let lower = 0,
    below = 0;
  for (const { bound, count } of buckets) {
    if (count >= wanted)
      return bound === Infinity
        ? lower
        : lower + (bound - lower) * ((wanted - below) / Math.max(count - below, 1e-9));
    lower = bound;
    below = count;
  }
  return lower;
}
