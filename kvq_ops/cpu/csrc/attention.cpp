// Attention over quantized stores: tiles of tokens are decoded in cache and meet all query heads of their kv head there.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

#include "ahead.h"
#include "calls.h"
#include "decode.h"
#include "gemm.h"
#include "integers.h"
#include "mask.h"
#include "parallel.h"
#include "profile.h"

namespace kvq {
namespace {

constexpr int64_t kFewRows = 8;     // up to here scores are sums along channels; beyond, queries lie across lanes
constexpr int64_t kFewTokens = 16;
constexpr int64_t kSpan = 256;      // tokens whose scores few rows have at once, so that weights are known to be small or not
constexpr int64_t kSpanTiles = kSpan / kTile;
constexpr int64_t kBlock = 192;     // query rows that share a decoded tile
constexpr int64_t kItems = 32;      // work is cut at least this fine, whatever the threads: results do not depend on them
constexpr int64_t kShortest = 256;  // tokens in a cut, at least
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Memory of a thread, kept between calls.
struct Scratch {
  std::unique_ptr<float, void (*)(void*)> memory{nullptr, std::free};
  int64_t size = 0, used = 0;
  void reserve(int64_t floats) {
    used = 0;
    if (floats <= size) return;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)));
    size = memory ? floats : 0;
  }
  float* take(int64_t floats) {
    float* p = memory.get() + used;
    used += (floats + 15) / 16 * 16;
    return p;
  }
};

Scratch& scratch() {
  thread_local Scratch s;
  return s;
}

// A block of query rows of one kv head: row r is head r % group of query first + r / group.
struct Block {
  const AttentionArgs& a;
  int64_t b, h, first, rows, group;
  int64_t query(int64_t r) const { return first + r / group; }
  int64_t head(int64_t r) const { return h * group + r % group; }
};

void load_query(const Block& k, int64_t r, float* out) {
  const AttentionArgs& a = k.a;
  const int64_t dim = a.key.dim;
  exact_row(a.query, at(a.query, k.b, k.head(r), k.query(r)), dim, out);
  if (turns(a.key)) rotate(out, dim, a.key.rotation);
  const float scale = float(a.scale);
  for (int64_t d = 0; d < dim; ++d) out[d] *= scale;
  for (int64_t d = dim; d < padded(dim); ++d) out[d] = 0.0f;
}

// Scales of the tokens of a tile, for a format whose scales fold; the tile has room for kTile.
void token_scales(const Side& s, int64_t b, int64_t h, int64_t t0, int64_t n, float* out) {
  if (s.static_scale) {
    std::fill(out, out + kTile, scale_of(s, b, h, 0));
    return;
  }
  each_run(s, b, t0, n, [&](const Run& run, int64_t i) {
    if (s.scale.dtype == F32 && s.scale.t == 1 && s.outer.dtype == NONE) {
      std::memcpy(out + i, at(s.scale, run.row, h, run.slot), run.count * 4);
    } else {
      for (int64_t t = 0; t < run.count; ++t) out[i + t] = scale_of(s, run.row, h, run.slot + t);
    }
  });
  std::fill(out + n, out + kTile, 0.0f);
}

// Whether a tile may leave out scales: none of its tokens is exact.
bool plain_tile(const Side& s, int64_t b, int64_t t0, int64_t n) { return folds(s) && all_coded(s, b, t0, n); }

// Bias of every query of a tile, [queries or rows][kTile]; false where no row may see anything.
struct Bias {
  float* rows;
  bool given, per_row;
  bool fill(const Block& k, int64_t t0, int64_t n) {
    given = false;
    if (k.a.mask.dtype == NONE) return true;
    per_row = k.a.mask.h != 0;
    const int64_t count = per_row ? k.rows : (k.rows + k.group - 1) / k.group;
    bool open = false, plain = true;
    for (int64_t r = 0; r < count; ++r)
      open |= bias_row(k.a, k.b, per_row ? k.head(r) : k.h * k.group, per_row ? k.query(r) : k.first + r, t0, n,
                       rows + r * kTile, plain);
    given = !plain;
    return open;
  }
  const float* of(const Block& k, int64_t r) const { return rows + (per_row ? r : r / k.group) * kTile; }
};

vf with_bias(vf s, vf bias) { return bias == -kInf ? set1(-kInf) : s + bias; }

vf soften(vf s, float softcap) { return softcap * tanh_(s * (1.0f / softcap)); }

struct State {
  float *m, *l, *acc;       // running maximum, sum of weights, weighted sum of values [rows][padded(Dv)]
  float* other = nullptr;   // a second such sum, [rows][wide], in an order of its own
  int64_t wide = 0;
};

void shrink_row(float* row, int64_t count, float x) {
  for (int64_t d = 0; d < count; d += W) store(row + d, load(row + d) * x);
}

// Scores of few rows as they enter the softmax: s[r][kSpan] of a tile, with key scales, softcap and mask; -inf beyond what a row sees.
void shape_few(const Block& k, Reach tile, bool inside, const float* key_scale, const Bias& bias, float* s, int64_t end) {
  const int64_t n = tile.hi - tile.lo;
  const float softcap = float(k.a.softcap);
  for (int64_t r = 0; r < k.rows; ++r, s += kSpan) {
    if (key_scale)
      for (int64_t t = 0; t < kTile; t += W) store(s + t, load(s + t) * load(key_scale + t));
    if (softcap > 0)
      for (int64_t t = 0; t < kTile; t += W) store(s + t, soften(load(s + t), softcap));
    if (bias.given) {
      const float* row = bias.of(k, r);
      for (int64_t t = 0; t < kTile; t += W) store(s + t, with_bias(load(s + t), load(row + t)));
    }
    int64_t lo = 0, hi = n;
    if (!inside) {
      const Reach own = reach_of(k.a, end, k.query(r));
      lo = std::clamp<int64_t>(own.lo - tile.lo, 0, n), hi = std::clamp<int64_t>(own.hi - tile.lo, 0, n);
    }
    if (lo > 0) std::fill(s, s + lo, -kInf);
    if (std::max(lo, hi) < kTile) std::fill(s + std::max(lo, hi), s + kTile, -kInf);
  }
}

// Softmax of the scores of few rows over the tiles of a span; leaves weights times value scales, which are [kSpan]. `coarse` says of each
// tile whether its weights are so small, against what was summed so far, that 16 bits of them do.
void soften_few(const Block& k, int64_t tiles, const float* value_scale, float* s, State& state, bool* coarse,
                Ahead& ahead) {
  const int64_t dv = padded(k.a.value.dim), width = tiles * kTile;
  std::fill(coarse, coarse + tiles, true);
  for (int64_t r = 0; r < k.rows; ++r, s += kSpan) {
    vf top = load(s);
    for (int64_t t = W; t < width; t += W) top = max(top, load(s + t));
    const float before = state.m[r], m = std::max(before, reduce_max(top));
    if (m == -kInf) {
      // A maximum may pass NaN over; the sum of weights must not.
      if (std::any_of(s, s + width, [](float x) { return x != x; })) state.m[r] = 0.0f, state.l[r] = kNan;
      std::fill(s, s + width, 0.0f);
      continue;
    }
    vf sum{}, tops[kSpanTiles];
    for (int64_t i = 0; i < tiles; ++i) {
      vf most{};
      KVQ_UNROLL for (int64_t t = i * kTile; t < (i + 1) * kTile; t += W) {
        const vf p = exp_negative(load(s + t) - m);
        sum += p, most = max(most, p);
        store(s + t, p * load(value_scale + t));
      }
      tops[i] = most;
      ahead.step(ahead.softmax);
    }
    const float shrink = exp_negative(set1(before - m))[0];
    state.m[r] = m;
    state.l[r] = state.l[r] * shrink + reduce_add(sum);
    for (int64_t i = 0; i < tiles; ++i) coarse[i] &= reduce_max(tops[i]) * 256.0f <= state.l[r];
    if (shrink != 1.0f) {
      shrink_row(state.acc + r * dv, dv, shrink);
      if (state.other) shrink_row(state.other + r * state.wide, state.wide, shrink);
    }
  }
}

// The same for many rows, s[t][width]: a lane is a query row. `mixed` holds what is added, in the shape of s.
void soften_many(const Block& k, int64_t n, int64_t width, const float* key_scale, const float* value_scale,
                 const float* mixed, float* s, State& state) {
  const int64_t dv = padded(k.a.value.dim);
  const float softcap = float(k.a.softcap);
  for (int64_t r = 0; r < width; r += W) {
    const vf before = load(state.m + r);
    vf top = before;
    for (int64_t t = 0; t < n; ++t) {
      vf x = load(s + t * width + r);
      if (key_scale) x *= key_scale[t];
      if (softcap > 0) x = soften(x, softcap);
      if (mixed) x = with_bias(x, load(mixed + t * width + r));
      store(s + t * width + r, x);
      top = max(top, x);
    }
    const vf base = top == -kInf ? vf{} : top;
    vf sum{};
    for (int64_t t = 0; t < n; ++t) {
      vf p = exp_negative(load(s + t * width + r) - base);
      sum += p;
      store(s + t * width + r, value_scale ? p * value_scale[t] : p);
    }
    const vf shrink = exp_negative(before - base);
    store(state.m + r, sum == sum ? top : vf{});  // a row that saw NaN is no closed row
    store(state.l + r, load(state.l + r) * shrink + sum);
    for (int i = 0; i < W && r + i < k.rows; ++i) {
      if (shrink[i] == 1.0f) continue;
      shrink_row(state.acc + (r + i) * dv, dv, shrink[i]);
    }
  }
}

// What is added to the scores of many rows, transposed to s[t][width].
void mix(const Block& k, Reach tile, const Bias& bias, int64_t end, int64_t width, float* out) {
  const int64_t n = tile.hi - tile.lo;
  for (int64_t r = 0; r < k.rows; ++r) {
    const Reach own = reach_of(k.a, end, k.query(r));
    const int64_t lo = std::clamp<int64_t>(own.lo - tile.lo, 0, n);
    const int64_t hi = std::max(lo, std::clamp<int64_t>(own.hi - tile.lo, 0, n));
    const float* row = bias.given ? bias.of(k, r) : nullptr;
    for (int64_t t = 0; t < lo; ++t) out[t * width + r] = -kInf;
    for (int64_t t = lo; t < hi; ++t) out[t * width + r] = row ? row[t] : 0.0f;
    for (int64_t t = hi; t < n; ++t) out[t * width + r] = -kInf;
  }
  for (int64_t t = 0; t < n; ++t) std::fill(out + t * width + k.rows, out + (t + 1) * width, 0.0f);
}

// Adds what a plane holds of tokens t0 .. end, as far as the first page, if it lies close together: `items` of each token.
void fetch(const Side& s, const Plane& p, int64_t items, const Block& k, int64_t t0, int64_t end, Ahead& ahead) {
  const int64_t size = item_size(p.dtype), bytes = items * size;
  if (p.dtype == NONE || end <= t0 || p.t * size > 2 * bytes) return;
  const Run run = run_of(s, k.b, t0, end - t0);
  const char* first = at(p, run.row, k.h, run.slot);
  ahead.add(first, first + (run.count - 1) * p.t * size + bytes);
}

void fetch_codes(const Side& s, const Block& k, int64_t t0, int64_t end, Ahead& ahead) {
  fetch(s, s.codes, bytes_of(s.bits, s.dim), k, t0, end, ahead);
}

void fetch_scales(const Side& s, const Block& k, int64_t t0, int64_t end, Ahead& ahead) {
  if (s.static_scale || s.scale_tokens != 1) return;
  fetch(s, s.scale, groups_of(s), k, t0, end, ahead);
  fetch(s, s.minimum, groups_of(s), k, t0, end, ahead);
}

// What to fetch during a span: its values, then all that the next one begins with. That may be another item's, which the same thread
// will mostly take.
Ahead ahead_of(const Block& k, const Integers& integers, int64_t from, int64_t to, int64_t end) {
  const AttentionArgs& a = k.a;
  const int64_t next = std::min(to + kSpan, end);
  Ahead ahead;
  fetch_codes(a.value, k, from, to, ahead);
  fetch_scales(a.key, k, to, next, ahead);
  fetch_codes(a.key, k, to, next, ahead);
  fetch_scales(a.value, k, to, next, ahead);
  const int64_t softmax = k.rows * ((to - from + kTile - 1) / kTile);
  const auto share = [&](int64_t eighths, int64_t steps) {
    return steps ? int((ahead.lines() * eighths + 8 * steps - 1) / (8 * steps)) : 0;
  };
  ahead.keys = share(3, integers.key_steps(to - from));
  ahead.softmax = share(2, softmax);
  ahead.values = share(3, integers.value_steps(to - from));
  return ahead;
}

// What a thread works with; many rows have a column each in `query` and `s`.
struct Desk {
  float *query, *key, *value, *s, *mixed, *key_scale, *value_scale;
  int64_t width, d, dv;
  Bias bias;
};

// Few rows over the tokens of `part`, a span at a time.
void attend_few(const Block& k, Reach part, int64_t end, Desk& desk, Integers& integers, State& state, Laps& laps) {
  const AttentionArgs& a = k.a;
  const Reach first = reach_of(a, end, k.first), last = reach_of(a, end, k.query(k.rows - 1));
  for (int64_t from = part.lo; from < part.hi; from += kSpan) {
    const int64_t to = std::min(from + kSpan, part.hi), tiles = (to - from + kTile - 1) / kTile;
    bool open[kSpanTiles], plain[kSpanTiles], coarse[kSpanTiles];
    Ahead ahead = ahead_of(k, integers, from, to, last.hi);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t t0 = from + i * kTile, n = std::min(kTile, to - t0);
      const Reach tile{t0, t0 + n};
      float* s = desk.s + i * kTile;
      plain[i] = false;
      open[i] = last.hi > tile.lo && first.lo < tile.hi && desk.bias.fill(k, t0, n);
      if (!open[i]) {
        for (int64_t r = 0; r < k.rows; ++r) std::fill(s + r * kSpan, s + r * kSpan + kTile, -kInf);
        continue;
      }
      const bool inside = first.hi >= tile.hi && last.lo <= tile.lo, key_plain = plain_tile(a.key, k.b, t0, n);
      if (key_plain) token_scales(a.key, k.b, k.h, t0, n, desk.key_scale);
      const bool done = integers.scores(t0, n, desk.key_scale, s, kSpan, ahead);
      // Decoded a few tokens at a time, which stay in the nearest cache.
      for (int64_t u = 0; !done && u < n; u += kFewTokens) {
        const int64_t now = std::min(kFewTokens, n - u), whole = (now + 7) / 8 * 8;
        decode_tile(a.key, k.b, k.h, t0 + u, now, desk.key, desk.d, key_plain, true);
        std::fill(desk.key + now * desk.d, desk.key + whole * desk.d, 0.0f);
        few_dots(k.rows, desk.query, desk.d, desk.key, desk.d, desk.d, whole, s + u, kSpan);
      }
      laps.lap(SCORES);
      shape_few(k, tile, inside, key_plain && !done ? desk.key_scale : nullptr, desk.bias, s, end);
      laps.lap(SOFTMAX);
    }
    if (std::none_of(open, open + tiles, [](bool x) { return x; })) continue;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t t0 = from + i * kTile, n = std::min(kTile, to - t0);
      plain[i] = open[i] && !integers.scales_values() && plain_tile(a.value, k.b, t0, n);
      if (plain[i]) token_scales(a.value, k.b, k.h, t0, n, desk.value_scale + i * kTile);
      else std::fill(desk.value_scale + i * kTile, desk.value_scale + (i + 1) * kTile, 1.0f);
    }
    soften_few(k, tiles, desk.value_scale, desk.s, state, coarse, ahead);
    laps.lap(SOFTMAX);
    for (int64_t i = 0; i < tiles;) {
      const int64_t t0 = from + i * kTile;
      if (!open[i]) {
        ++i;
        continue;
      }
      const float* s = desk.s + i * kTile;
      // Two tiles at once where both are alike.
      const bool two = i + 1 < tiles && open[i + 1] && coarse[i] == coarse[i + 1];
      const int64_t n = std::min(two ? 2 * kTile : kTile, to - t0);
      if (integers.values(t0, n, desk.value_scale + i * kTile, s, kSpan, coarse[i], ahead)) {
        i += two ? 2 : 1;
        continue;
      }
      for (int64_t u = 0; u < std::min(n, kTile); u += kFewTokens) {
        const int64_t now = std::min({kFewTokens, n - u, kTile - u});
        decode_tile(a.value, k.b, k.h, t0 + u, now, desk.value, desk.dv, plain[i], true);
        product<true>(k.rows, desk.dv / W, now, s + u, kSpan, 1, desk.value, desk.dv, state.acc, desk.dv);
      }
      ++i;
    }
    laps.lap(VALUES);
  }
}

// Many rows, a tile at a time.
void attend_many(const Block& k, Reach part, int64_t end, Desk& desk, State& state) {
  const AttentionArgs& a = k.a;
  const Reach first = reach_of(a, end, k.first), last = reach_of(a, end, k.query(k.rows - 1));
  const int64_t width = desk.width;
  for (int64_t t0 = part.lo; t0 < part.hi; t0 += kTile) {
    const Reach tile{t0, std::min(t0 + kTile, part.hi)};
    const int64_t n = tile.hi - tile.lo;
    if (last.hi <= tile.lo || first.lo >= tile.hi || !desk.bias.fill(k, t0, n)) continue;
    const bool inside = first.hi >= tile.hi && last.lo <= tile.lo;
    const bool key_plain = plain_tile(a.key, k.b, t0, n), value_plain = plain_tile(a.value, k.b, t0, n);
    if (key_plain) token_scales(a.key, k.b, k.h, t0, n, desk.key_scale);
    if (value_plain) token_scales(a.value, k.b, k.h, t0, n, desk.value_scale);
    decode_tile(a.key, k.b, k.h, t0, n, desk.key, desk.d, key_plain, true);
    product<false>(n, width / W, desk.d, desk.key, desk.d, 1, desk.query, width, desk.s, width);
    const bool mixes = !inside || desk.bias.given;
    if (mixes) mix(k, tile, desk.bias, end, width, desk.mixed);
    soften_many(k, n, width, key_plain ? desk.key_scale : nullptr, value_plain ? desk.value_scale : nullptr,
                mixes ? desk.mixed : nullptr, desk.s, state);
    decode_tile(a.value, k.b, k.h, t0, n, desk.value, desk.dv, value_plain, true);
    product<true>(k.rows, desk.dv / W, n, desk.s, 1, width, desk.value, desk.dv, state.acc, desk.dv);
  }
}

// One block of rows over the tokens of `part`.
void attend(const Block& k, Reach part, int64_t end, State& state) {
  const AttentionArgs& a = k.a;
  const bool few = k.rows <= kFewRows;
  Desk desk{};
  const int64_t width = desk.width = few ? k.rows : padded(k.rows);
  const int64_t d = desk.d = padded(a.key.dim), dv = desk.dv = padded(a.value.dim), tokens = few ? kSpan : kTile;
  const int64_t integer_size = few ? Integers::size(a, k.rows) : 0;
  Scratch& memory = scratch();
  memory.reserve(width * d + kTile * (d + dv + k.rows) + tokens * (few ? width : 2 * width) + tokens + kTile + 256 + integer_size);
  desk.query = memory.take(width * d);
  desk.key = memory.take(kTile * d);
  desk.value = memory.take(kTile * dv);
  desk.s = memory.take(tokens * width);
  desk.mixed = few ? nullptr : memory.take(tokens * width);
  desk.bias = Bias{memory.take(kTile * k.rows), false, false};
  desk.key_scale = memory.take(kTile);
  desk.value_scale = memory.take(tokens);
  std::fill(state.m, state.m + width, -kInf);
  std::fill(state.l, state.l + width, 0.0f);
  std::fill(state.acc, state.acc + k.rows * dv, 0.0f);
  if (!few) {
    for (int64_t r = 0; r < width; ++r) {
      if (r < k.rows) load_query(k, r, desk.key);
      else std::fill(desk.key, desk.key + d, 0.0f);
      for (int64_t i = 0; i < d; ++i) desk.query[i * width + r] = desk.key[i];
    }
    return attend_many(k, part, end, desk, state);
  }
  Laps laps;
  for (int64_t r = 0; r < k.rows; ++r) load_query(k, r, desk.query + r * d);
  Integers integers(a, k.b, k.h, k.rows);
  integers.prepare(memory.take(integer_size), desk.query, d);
  state.other = integers.sums(), state.wide = integers.wide();
  laps.lap(PREPARE);
  attend_few(k, part, end, desk, integers, state, laps);
  for (int64_t r = 0; integers.sums() && r < k.rows; ++r) integers.add_to(r, state.acc + r * dv);
  laps.lap(MERGE);
}

// Divides by the sum of weights, a sink included, and writes a row of the result.
void finish(const Block& k, int64_t r, float m, float l, float* acc) {
  const AttentionArgs& a = k.a;
  const int64_t dim = a.value.dim;
  float factor = 0.0f;
  if (m > -kInf) {
    float top = m, total = l;
    if (a.sinks.dtype != NONE) {
      const float sink = load_number(at(a.sinks, 0, k.head(r), 0), a.sinks.dtype);
      top = std::max(m, sink);
      total = l * std::exp(m - top) + std::exp(sink - top);
    }
    factor = total == 0.0f ? 0.0f : std::exp(m - top) / total;
  }
  for (int64_t d = 0; d < dim; ++d) acc[d] = factor == 0.0f ? 0.0f : acc[d] * factor;
  if (turns(a.value)) unrotate(acc, dim, a.value.rotation);
  const int64_t row = (k.b * a.query_heads + k.head(r)) * a.queries + k.query(r);
  char* out = a.out + row * dim * item_size(a.query.dtype);
  for (int64_t d = 0; d < dim; ++d) store_number(out + d * item_size(a.query.dtype), a.query.dtype, acc[d]);
}

int64_t run(AttentionArgs a) {
  const int64_t batch = a.key.batch, heads = a.key.heads;
  if (batch * heads * a.queries * a.query_heads == 0) return 0;
  const int64_t group = a.query_heads / heads, all = group * a.queries;
  // Whole queries in a block, where a query has not more heads than fit.
  const int64_t per_block = all <= kFewRows ? a.queries : std::max<int64_t>(1, kBlock / group);
  const int64_t blocks = (a.queries + per_block - 1) / per_block;
  const int64_t rows = std::min(per_block, a.queries) * group, dv = padded(a.value.dim);
  const int64_t width = padded(rows);

  std::unique_ptr<Reach[]> reach(new Reach[batch]);
  int64_t longest = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = end_of(a, b);
    reach[b] = masked_reach(a, b, Reach{reach_of(a, end, 0).lo, reach_of(a, end, a.queries - 1).hi});
    longest = std::max(longest, reach[b].hi - reach[b].lo);
  }
  int64_t furthest = 0;
  for (int64_t b = 0; b < batch; ++b) furthest = std::max(furthest, reach[b].hi);
  for (Side* side : {&a.key, &a.value})
    if (side->position.dtype != NONE) find_sines(*side, last_position(*side, furthest));
  const int64_t plain_items = batch * heads * blocks;
  int64_t splits = std::min((kItems + plain_items - 1) / plain_items, (longest + kShortest - 1) / kShortest);
  splits = std::max<int64_t>(splits, 1);
  const int64_t items = plain_items * splits, part_size = width * 2 + rows * dv;
  std::unique_ptr<float, void (*)(void*)> parts(
      static_cast<float*>(std::aligned_alloc(64, (items * part_size * 4 + 63) / 64 * 64)), std::free);
  if (!parts) return 1;
  const bool tiny = all * longest * (a.key.dim + a.value.dim) * batch * heads < 1 << 19;
  const int64_t threads = tiny ? 1 : a.threads;

  auto block_of = [&](int64_t i) {
    // The last queries see most; they go first.
    const int64_t which = blocks - 1 - i % blocks, first = which * per_block;
    return Block{a, i / blocks / heads, i / blocks % heads, first, std::min(per_block, a.queries - first) * group, group};
  };
  auto state_of = [&](int64_t i, int64_t split) {
    float* p = parts.get() + (i * splits + split) * part_size;
    return State{p, p + width, p + 2 * width};
  };
  // Of a sequence that is cut, a thread takes parts that follow each other where it can, so that what it fetched ahead is what it needs.
  const int64_t lanes = splits > 1 ? std::min(threads, items) : 1, lane = (items + lanes - 1) / lanes;
  parallel(lanes * lane, threads, [&](int64_t turn) {
    const int64_t item = turn % lanes * lane + turn / lanes;
    if (item >= items) return;
    const Block k = block_of(item / splits);
    State state = state_of(item / splits, item % splits);
    const int64_t end = end_of(a, k.b);
    Reach r = reach[k.b];
    r.lo = std::max(r.lo, reach_of(a, end, k.first).lo);
    r.hi = std::min(r.hi, reach_of(a, end, k.query(k.rows - 1)).hi);
    r.lo = r.lo / kTile * kTile;
    const int64_t tiles = std::max<int64_t>(0, (r.hi - r.lo + kTile - 1) / kTile);
    const int64_t each = (tiles + splits - 1) / splits * kTile, from = r.lo + item % splits * each;
    attend(k, Reach{from, std::min(r.hi, from + each)}, end, state);
    if (splits == 1)
      for (int64_t row = 0; row < k.rows; ++row) finish(k, row, state.m[row], state.l[row], state.acc + row * dv);
  });
  if (splits == 1) return 0;
  parallel(plain_items, threads, [&](int64_t i) {
    Laps laps;
    const Block k = block_of(i);
    State total = state_of(i, 0);
    for (int64_t row = 0; row < k.rows; ++row) {
      float m = -kInf, l = 0.0f;
      for (int64_t s = 0; s < splits; ++s) m = std::max(m, state_of(i, s).m[row]);
      float* acc = total.acc + row * dv;
      for (int64_t s = 0; m > -kInf && s < splits; ++s) {
        const State part = state_of(i, s);
        const float x = std::exp(part.m[row] - m);
        l += x * part.l[row];
        if (s == 0) for (int64_t d = 0; d < dv; d += W) store(acc + d, load(acc + d) * x);
        else for (int64_t d = 0; d < dv; d += W) store(acc + d, load(acc + d) + load(part.acc + row * dv + d) * x);
      }
      finish(k, row, m, l, acc);
    }
    laps.lap(MERGE);
  });
  return 0;
}

}  // namespace
}  // namespace kvq

extern "C" int64_t kvq_attention(const kvq::AttentionArgs* args) { return kvq::run(*args); }
