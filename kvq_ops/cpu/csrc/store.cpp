// quantize, append_ and dequantize: tokens into a store and out of it.
#include "calls.h"
#include "encode.h"
#include "parallel.h"

namespace kvq {

namespace {

// Where a token goes; below zero, among pages, is nowhere.
int64_t position_of(const AppendArgs& a, int64_t b, int64_t n) {
  const Plane& p = a.position;
  return p.dtype == NONE ? n : load_integer(p, b * p.b + n * p.t);
}

// A vector that goes to position `slot`, in the space in which it is coded.
void load_vector(const Side& s, const Plane& from, int64_t b, int64_t h, int64_t t, int64_t slot, float* out) {
  exact_row(from, at(from, b, h, t), s.dim, out);
  if (!s.rotation && !s.sines) return;
  const auto drop = [&] {
    for (int64_t d = 0; d < s.dim; ++d)
      if (!finite(bits_of(out[d]))) out[d] = 0.0f;
  };
  drop();
  if (s.sines) turn_by(s.sines->at(slot), out, s.dim, true);
  if (!s.rotation) return;
  drop();  // turning huge numbers may have made infinite ones
  rotate(out, s.dim, s.rotation);
}

void put_bytes(const Plane& p, char* to, const uint8_t* from, int64_t n) {
  if (p.d == 1) std::memcpy(to, from, n);
  else for (int64_t i = 0; i < n; ++i) to[i * p.d] = char(from[i]);
}

void put_parameter(const Plane& p, char* to, const Shared& shared, float x) {
  if (p.dtype == E4M3 || p.dtype == E8M0) *to = char(shared.byte);
  else store_number(to, p.dtype, x);
}

// The static scale that belongs to head h.
float fixed_scale(const Side& s, int64_t h) {
  if (s.outer.dtype != NONE) return outer_scale(s);
  return s.static_scale ? load_number(at(s.scale, 0, h, 0), s.scale.dtype) : 0.0f;
}

void put_outliers(const Side& s, int64_t b, int64_t h, int64_t slot, float* x) {
  int16_t index[kMaxDim];
  float value[kMaxDim];
  take_outliers(s, h, x, index, value);
  for (int64_t k = 0; k < s.outliers; ++k) {
    std::memcpy(at(s.outlier_index, b, h, slot, k), &index[k], 2);
    store_number(at(s.outlier_value, b, h, slot, k), s.outlier_value.dtype, value[k]);
  }
}

// Codes `rows` tokens (one, or a whole group), x[rows][dim], from slot `slot` of row `b` on; their positions begin at `position`.
// x is spoilt.
void put_tokens(const Side& s, int64_t b, int64_t h, int64_t slot, float* x, int64_t rows, int64_t position) {
  const int64_t dim = s.dim;
  const float fixed = fixed_scale(s, h);
  float made[16];
  const float* table = table_of(s, h, made);
  uint8_t codes[kMaxDim], bytes[kMaxDim];
  for (int64_t r = 0; r < rows; ++r) {
    if (s.outliers) put_outliers(s, b, h, slot + r, x + r * dim);
    if (s.position.dtype != NONE && h == 0) {
      const int32_t number = int32_t(position + r + 1);
      std::memcpy(at(s.position, b, 0, slot + r), &number, 4);
    }
  }
  if (s.scale_tokens > 1) {
    // Groups along tokens are made contiguous.
    float column[kMaxGroup];
    uint8_t coded[kMaxGroup];
    std::vector<uint8_t> all(rows * dim);
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t r = 0; r < rows; ++r) column[r] = x[r * dim + d];
      Shared p;
      encode_group(s, h, column, rows, fixed, table, p, coded);
      for (int64_t r = 0; r < rows; ++r) all[r * dim + d] = coded[r];
      put_parameter(s.scale, at(s.scale, b, h, slot / s.scale_tokens, d), p, p.scale);
      if (s.minimum.dtype != NONE) put_parameter(s.minimum, at(s.minimum, b, h, slot / s.scale_tokens, d), p, p.minimum);
    }
    for (int64_t r = 0; r < rows; ++r) {
      pack(all.data() + r * dim, dim, s.bits, bytes);
      put_bytes(s.codes, at(s.codes, b, h, slot + r), bytes, bytes_of(s.bits, dim));
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r, x += dim, ++slot) {
    const int64_t wide = s.scale_channels && !s.static_scale ? s.scale_channels : dim;
    for (int64_t d = 0, g = 0; d < dim; d += wide, ++g) {
      Shared p;
      encode_group(s, h, x + d, std::min(wide, dim - d), fixed, table, p, codes + d);
      if (s.static_scale) continue;
      put_parameter(s.scale, at(s.scale, b, h, slot, g), p, p.scale);
      if (s.minimum.dtype != NONE) put_parameter(s.minimum, at(s.minimum, b, h, slot, g), p, p.minimum);
    }
    pack(codes, dim, s.bits, bytes);
    put_bytes(s.codes, at(s.codes, b, h, slot), bytes, bytes_of(s.bits, dim));
  }
}

void copy_token(const Plane& from, const char* x, const Plane& to, char* y, int64_t dim) {
  const int64_t size = item_size(to.dtype);
  if (from.d == 1 && to.d == 1) std::memcpy(y, x, dim * size);
  else for (int64_t d = 0; d < dim; ++d) std::memcpy(y + d * to.d * size, x + d * from.d * size, size);
}

// Static scales that are unset are fitted to the vectors that `visit(b, h, use)` passes to `use`.
template <class Visit>
void calibrate(const Side& s, int64_t threads, const Visit& visit) {
  const bool nv = s.rule == NVFP4;
  if ((!nv && !s.static_scale) || s.calibrated) return;
  const Plane& plane = nv ? s.outer : s.scale;
  const bool per_head = plane.h != 0;
  const int64_t count = per_head ? s.heads : 1;
  bool unset = false;
  for (int64_t h = 0; h < count; ++h) unset |= load_static(plane, h, 0) == 0.0f;
  if (!unset) return;
  std::vector<float> lowest(s.batch * s.heads, 0.0f), highest(s.batch * s.heads, 0.0f);
  parallel(s.batch * s.heads, threads, [&](int64_t i) {
    visit(i / s.heads, i % s.heads, [&](float* x) {
      if (s.outliers) {
        int16_t index[kMaxDim];
        float value[kMaxDim];
        take_outliers(s, i % s.heads, x, index, value);
      }
      for (int64_t d = 0; d < s.dim; ++d) {
        const float v = finite(bits_of(x[d])) ? x[d] : 0.0f;
        lowest[i] = std::min(lowest[i], v), highest[i] = std::max(highest[i], v);
      }
    });
  });
  for (int64_t h = 0; h < count; ++h) {
    if (load_static(plane, h, 0) != 0.0f) continue;
    float low = 0.0f, high = 0.0f;
    for (int64_t i = 0; i < s.batch * s.heads; ++i)
      if (!per_head || i % s.heads == h) low = std::min(low, lowest[i]), high = std::max(high, highest[i]);
    char* to = at(plane, 0, h, 0);
    if (s.zero_point.dtype == NONE) {
      const float amax = std::max(high, -low), divisor = nv ? 448.0f * 6.0f : largest_code(s);
      store_number(to, F32, amax > 0.0f ? std::max(amax, kSmallest) / divisor : 0.0f);
    } else {
      low = std::max(low, -kLargest), high = std::min(high, kLargest);
      const float top = float((1 << s.bits) - 1);
      const float scale = high > low ? std::max(high - low, kSmallest) / top : 0.0f;
      const float zero = scale != 0.0f ? std::nearbyint(-low / scale) : 0.0f;
      store_number(to, F32, scale);
      store_number(at(s.zero_point, 0, h, 0), F32, std::min(std::max(zero, 0.0f), top) + 0.0f);
    }
  }
}

void append_plain(const AppendArgs& a, int64_t threads) {
  const Side& s = a.side;
  calibrate(s, threads, [&](int64_t b, int64_t h, auto&& use) {
    float x[kMaxDim];
    for (int64_t n = 0; n < a.count; ++n) {
      const int64_t position = position_of(a, b, n);
      if (position >= 0) load_vector(s, a.x, b, h, n, position, x), use(x);
    }
  });
  parallel(s.batch * s.heads, threads, [&](int64_t i) {
    const int64_t b = i / s.heads, h = i % s.heads;
    float x[kMaxDim];
    for (int64_t n = 0; n < a.count; ++n) {
      const int64_t position = position_of(a, b, n);
      if (position < 0) continue;
      const Run to = run_of(s, b, position, 1);
      if (s.rule == COPY) {
        copy_token(a.x, at(a.x, b, h, n), s.codes, at(s.codes, to.row, h, to.slot), s.dim);
      } else {
        load_vector(s, a.x, b, h, n, position, x);
        put_tokens(s, to.row, h, to.slot, x, 1, position);
      }
    }
  });
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t n = 0; n < a.count; ++n) {
      const int64_t position = position_of(a, b, n);
      if (position < 0) continue;
      const Run to = run_of(s, b, position, 1);
      int64_t& length = reinterpret_cast<int64_t*>(s.length.data)[to.row * s.length.b];
      length = std::max(length, to.slot + 1);
    }
}

// One row of a store with a window, before and after an append; see kvq_ops/window.py.
struct Row {
  int64_t start, end;
  int64_t held, coded;      // before
  int64_t kept, reopened;   // tokens that stay after rolling back, and how many of them are in codes
  int64_t target;           // tokens in codes afterwards
};

// Tokens of a group that is cut through go back to the ring as what they read as.
void reopen(const Side& s, int64_t b, int64_t h, const Row& row) {
  const int64_t group = s.scale_tokens;
  float x[kMaxDim + 64];
  Side base = s;
  base.window = base.sinks = 0;
  const float largest = largest_number(s.ring.dtype);
  for (int64_t t = row.reopened; t < std::min({row.coded, row.kept, row.reopened + group}); ++t) {
    char* to = at(s.ring, b, h, t % s.window);
    if (t < s.sinks) {
      copy_token(s.sink, at(s.sink, b, h, t), s.ring, to, s.dim);
      continue;
    }
    decode_tile(base, b, h, t, 1, x, padded(s.dim), false, false);
    const int64_t step = s.ring.d * item_size(s.ring.dtype);
    for (int64_t d = 0; d < s.dim; ++d)
      store_number(to + d * step, s.ring.dtype, std::min(std::max(x[d], -largest), largest));
  }
}

void load_aged(const AppendArgs& a, int64_t b, int64_t h, const Row& row, int64_t t, float* out) {
  const Side& s = a.side;
  if (t < row.start) load_vector(s, s.ring, b, h, t % s.window, t, out);
  else load_vector(s, a.x, b, h, t - row.start, t, out);
}

void append_window(const AppendArgs& a, int64_t threads) {
  const Side& s = a.side;
  const int64_t group = s.scale_tokens;
  int64_t* coded = reinterpret_cast<int64_t*>(s.coded.data);
  int64_t* length = reinterpret_cast<int64_t*>(s.length.data);
  std::vector<Row> rows(s.batch);
  for (int64_t b = 0; b < s.batch; ++b) {
    Row& r = rows[b];
    r.start = position_of(a, b, 0), r.end = r.start + a.count;
    r.held = length[b * s.length.b], r.coded = coded[b * s.coded.b];
    r.kept = std::min(r.start, r.held);
    r.reopened = std::min(r.coded, r.kept / group * group);
    const int64_t most = std::min((a.count + group - 1) / group, s.tokens / group) * group;
    r.target = std::max(r.reopened, std::max<int64_t>(r.end - s.recent, 0) / group * group);
    r.target = std::min(r.target, r.reopened + most);
  }
  parallel(s.batch * s.heads, threads, [&](int64_t i) {
    const Row& r = rows[i / s.heads];
    if (group > 1 && r.reopened < r.coded) reopen(s, i / s.heads, i % s.heads, r);
  });
  // To all tokens that are known by the time the first is coded: the first alone says little of the others.
  const bool codes = std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.target > r.reopened; });
  calibrate(s, threads, [&](int64_t b, int64_t h, auto&& use) {
    float x[kMaxDim];
    for (int64_t t = rows[b].reopened; codes && t < rows[b].end; ++t) load_aged(a, b, h, rows[b], t, x), use(x);
  });
  parallel(s.batch * s.heads, threads, [&](int64_t i) {
    const int64_t b = i / s.heads, h = i % s.heads;
    const Row& r = rows[b];
    std::vector<float> x(group * s.dim);
    for (int64_t t = r.reopened; t < r.target; t += group) {
      for (int64_t g = 0; g < group; ++g) load_aged(a, b, h, r, t + g, x.data() + g * s.dim);
      put_tokens(s, b, h, t, x.data(), group, t);
    }
    for (int64_t t = r.end - std::min(a.count, s.window); t < r.end; ++t)
      copy_token(a.x, at(a.x, b, h, t - r.start), s.ring, at(s.ring, b, h, t % s.window), s.dim);
    for (int64_t t = r.start; t < std::min(r.end, s.sinks); ++t)
      copy_token(a.x, at(a.x, b, h, t - r.start), s.sink, at(s.sink, b, h, t), s.dim);
  });
  for (int64_t b = 0; b < s.batch; ++b) coded[b * s.coded.b] = rows[b].target, length[b * s.length.b] = rows[b].end;
}

int64_t append(AppendArgs a) {
  Side& s = a.side;
  if (s.batch * s.heads * a.count * s.dim == 0) return 0;
  const int64_t threads = s.batch * s.heads * a.count * s.dim < 1 << 15 ? 1 : a.threads;
  if (s.position.dtype != NONE) {
    int64_t last = 0;
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t n = 0; n < a.count; ++n) last = std::max(last, position_of(a, b, n));
    // What goes back to the ring may have come from anywhere, in a cache that was reordered.
    if (s.window) last = std::max(last, last_position(s, s.tokens));
    find_sines(s, last);
  }
  if (s.window) append_window(a, threads);
  else append_plain(a, threads);
  return 0;
}

int64_t dequantize(DequantizeArgs a) {
  Side& s = a.side;
  if (s.position.dtype != NONE) find_sines(s, last_position(s, s.tokens));
  const int64_t blocks = (s.tokens + kTile - 1) / kTile, ld = padded(s.dim), size = item_size(a.dtype);
  const int64_t work = s.batch * s.heads * s.tokens * s.dim;
  const float largest = largest_number(a.dtype);
  parallel(s.batch * s.heads * blocks, work < 1 << 15 ? 1 : a.threads, [&](int64_t i) {
    const int64_t row = i / blocks, t0 = i % blocks * kTile, n = std::min(kTile, s.tokens - t0);
    std::vector<float> tile(kTile * ld + W);
    decode_tile(s, row / s.heads, row % s.heads, t0, n, tile.data(), ld, false, false);
    for (int64_t t = 0; t < n; ++t) {
      char* out = a.out + ((row * s.tokens + t0 + t) * s.dim) * size;
      float* x = tile.data() + t * ld;
      for (int64_t d = 0; d < s.dim; ++d) x[d] = x[d] > largest ? largest : x[d] < -largest ? -largest : x[d];
      if (a.dtype == F32) std::memcpy(out, x, s.dim * 4);
      else for (int64_t d = 0; d < s.dim; ++d) store_number(out + d * size, a.dtype, x[d]);
    }
  });
  return 0;
}

}  // namespace
}  // namespace kvq

extern "C" int64_t kvq_append(const kvq::AppendArgs* args) { return kvq::append(*args); }
extern "C" int64_t kvq_dequantize(const kvq::DequantizeArgs* args) { return kvq::dequantize(*args); }

// Reads `bytes` of memory with `threads` threads and returns something that depends on all of it: how fast memory can be read.
extern "C" int64_t kvq_read(const int64_t* args) {
  const uint64_t* data = reinterpret_cast<const uint64_t*>(args[0]);
  const int64_t words = args[1] / 8, piece = int64_t(1) << 16, pieces = (words + piece - 1) / piece;
  std::atomic<uint64_t> total{0};
  kvq::parallel(pieces, args[2], [&](int64_t i) {
    uint64_t sum[32] = {};
    int64_t w = i * piece;
    const int64_t end = std::min(words, w + piece);
    for (; w + 32 <= end; w += 32)
      for (int j = 0; j < 32; ++j) sum[j] += data[w + j];
    for (; w < end; ++w) sum[0] += data[w];
    uint64_t all = 0;
    for (uint64_t x : sum) all += x;
    total.fetch_add(all, std::memory_order_relaxed);
  });
  return int64_t(total.load());
}
