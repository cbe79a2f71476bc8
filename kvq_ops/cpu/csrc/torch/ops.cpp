// The operators kvq::quantize, dequantize, append_, attention and the paged forms of the last two for processes without Python, such as one that loads an
// AOTInductor package. What a format's name means is in a table that kvq_ops/cpu/package.py writes.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <string>

#include "../calls.h"

namespace {

using at::Tensor;
using at::TensorList;

struct KnownPlane {
  const char *name, *axes;
  int64_t dtype, per, items, tokens, size;  // dtype 0: that of the cache
};

struct Known {
  const char* name;
  int64_t numbers[13];  // the first fields of kvq::Side
  struct {
    int64_t index, dtype;
  } slots[14];          // its planes
  float table[16];
  int64_t count;        // planes, length included
  KnownPlane planes[12];
  bool lossless, windowed, calibrated;
  double outliers;
  int64_t marker;       // the first static plane, or -1
};

#include "formats.inc"

const Known& known(c10::string_view name) {
  for (const Known& f : kFormats)
    if (name == f.name) return f;
  TORCH_CHECK(false, "kvq: format '", name, "' is not in this library; build it with kvq_ops.cpu.package.build_ops");
}

int64_t dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return kvq::F32;
    case at::kHalf: return kvq::F16;
    case at::kBFloat16: return kvq::BF16;
    case at::kDouble: return kvq::F64;
    case at::kChar: return kvq::I8;
    case at::kByte: return kvq::U8;
    case at::kShort: return kvq::I16;
    case at::kInt: return kvq::I32;
    case at::kLong: return kvq::I64;
    case at::kBool: return kvq::BOOL;
    default: TORCH_CHECK(false, "kvq: no kernel reads ", t.scalar_type());
  }
}

at::ScalarType scalar_of(int64_t dtype) {
  switch (dtype) {
    case kvq::F32: return at::kFloat;
    case kvq::F16: return at::kHalf;
    case kvq::BF16: return at::kBFloat16;
    case kvq::I8: return at::kChar;
    case kvq::I16: return at::kShort;
    case kvq::I32: return at::kInt;
    case kvq::I64: return at::kLong;
    default: return at::kByte;
  }
}

struct Shape {
  int64_t batch, heads, tokens, dim;
};

int64_t outliers_of(const Known& f, int64_t dim) {
  // As Python rounds: a half goes to the even neighbour.
  return f.outliers > 0 ? std::max<int64_t>(1, int64_t(std::nearbyint(double(dim) * f.outliers / 100))) : 0;
}

std::vector<int64_t> sizes_of(const Known& f, const KnownPlane& p, const Shape& s) {
  std::vector<int64_t> sizes;
  for (const char* axis = p.axes; *axis; ++axis) {
    const int64_t groups = p.per == 0 ? p.items : (s.dim + p.per - 1) / p.per * p.items;
    switch (*axis) {
      case 'B': sizes.push_back(s.batch); break;
      case 'H': sizes.push_back(s.heads); break;
      case 'T': sizes.push_back((s.tokens + p.tokens - 1) / p.tokens); break;
      case 'D': sizes.push_back(std::strncmp(p.name, "outlier", 7) ? groups : outliers_of(f, s.dim)); break;
      case '1': sizes.push_back(1); break;
      default: sizes.push_back(p.size);
    }
  }
  return sizes;
}

Shape shape_of(const Known& f, TensorList store) {
  TORCH_CHECK(int64_t(store.size()) == f.count, "kvq: a store of format ", f.name, " has ", f.count, " planes, got ",
              store.size());
  const Tensor& codes = store[0];
  TORCH_CHECK(codes.dim() == 4, "kvq: codes must be [B, H, T, packed D], got ", codes.sizes());
  const KnownPlane& first = f.planes[0];
  const Shape s{codes.size(0), codes.size(1), codes.size(2), codes.size(3) / first.items * first.per};
  for (int64_t i = 0; i < f.count; ++i) {
    const Tensor& t = store[i];
    const KnownPlane& p = f.planes[i];
    TORCH_CHECK(t.device().is_cpu() && t.sizes() == at::IntArrayRef(sizes_of(f, p, s)) &&
                    (p.dtype ? t.scalar_type() == scalar_of(p.dtype) : t.is_floating_point()),
                "kvq: plane ", p.name, " of format ", f.name, " is ", t.scalar_type(), " ", t.sizes());
  }
  TORCH_CHECK(s.dim <= 1024, "kvq: head_dim ", s.dim, " is above 1024");
  return s;
}

kvq::Plane plane_of(const Tensor& t, const char* axes, int64_t dtype = 0) {
  kvq::Plane p{static_cast<char*>(t.data_ptr()), dtype ? dtype : dtype_of(t), 0, 0, 0, 0};
  for (int64_t i = 0; axes[i]; ++i) {
    const int64_t stride = t.stride(i);
    switch (axes[i]) {
      case 'B': p.b = stride; break;
      case 'H': p.h = stride; break;
      case 'T': p.t = stride; break;
      case 'D': p.d = stride; break;
      case 'N': (t.dim() == 4 ? p.t : p.d) = stride; break;  // of a window, or of a codebook
    }
  }
  return p;
}

kvq::Side side_of(const Known& f, TensorList store) {
  kvq::Side side{};
  const Shape s = shape_of(f, store);
  std::memcpy(&side, f.numbers, sizeof f.numbers);
  side.outliers = outliers_of(f, s.dim);
  side.batch = s.batch, side.heads = s.heads, side.tokens = s.tokens, side.dim = s.dim;
  kvq::Plane* planes = &side.codes;
  for (int i = 0; i < 14; ++i) {
    const auto& slot = f.slots[i];
    if (slot.index >= 0) planes[i] = plane_of(store[slot.index], f.planes[slot.index].axes, slot.dtype);
  }
  side.table = f.table;
  return side;
}

void check_values(const Tensor& x, const char* what) {
  TORCH_CHECK(x.device().is_cpu() && x.dim() == 4 &&
                  (x.scalar_type() == at::kFloat || x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16),
              "kvq: ", what, " must be four-dimensional float32, float16 or bfloat16, got ", x.scalar_type(), " ", x.sizes());
}

// Shapes of x and of what must be the same for pages.
void check_append(const Known& f, const Shape& s, TensorList store, const Tensor& x, int64_t batch, const char* op) {
  check_values(x, "x");
  TORCH_CHECK(x.size(0) == batch && x.size(1) == s.heads && x.size(3) == s.dim, op, " of x ", x.sizes(), " into a cache [",
              s.batch, ", ", s.heads, ", ", s.tokens, ", ", s.dim, "]");
  for (int64_t i = 0; i < f.count; ++i)
    TORCH_CHECK(f.planes[i].dtype || store[i].scalar_type() == x.scalar_type(), op, " of ", x.scalar_type(),
                " into a cache that keeps exact ", store[i].scalar_type());
  TORCH_CHECK(!f.calibrated || store[f.marker].ne(0).any().item<bool>(), op, " in format ", f.name, ": the store was not calibrated");
}

void append_(TensorList store, const Tensor& position, const Tensor& x, c10::string_view format) {
  const Known& f = known(format);
  const Shape s = shape_of(f, store);
  check_append(f, s, store, x, s.batch, "kvq::append_");
  const int64_t count = x.size(2);
  TORCH_CHECK((position.scalar_type() == at::kLong || position.scalar_type() == at::kInt) &&
                  (position.sizes() == at::IntArrayRef({count}) || position.sizes() == at::IntArrayRef({s.batch, count})),
              "kvq::append_ position must be integers [N] or [B, N], got ", position.sizes());
  if (x.numel() == 0) return;
  const Tensor wide = position.to(at::kLong).expand({s.batch, count}).contiguous();
  const int64_t* at = wide.data_ptr<int64_t>();
  const Tensor& length = store[f.count - 1];
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t held = length.data_ptr<int64_t>()[b * length.stride(0)];
    for (int64_t n = 0; n < count; ++n) {
      const int64_t p = at[b * count + n];
      TORCH_CHECK(p >= 0 && p < s.tokens, "kvq::append_ at ", p, " of a cache of ", s.tokens, " tokens");
      TORCH_CHECK(!f.windowed || (n == 0 ? p <= held : p == at[b * count + n - 1] + 1), "kvq::append_ in format ", f.name,
                  ": positions must follow each other and what is held");
    }
  }
  const kvq::AppendArgs args{side_of(f, store), plane_of(x, "BHTD"), plane_of(wide, "BT"), count, at::get_num_threads()};
  TORCH_CHECK(kvq_append(&args) == 0, "kvq::append_: not enough memory");
}

std::vector<Tensor> quantize(const Tensor& x, c10::string_view format) {
  const Known& f = known(format);
  check_values(x, "x");
  TORCH_CHECK(!f.calibrated, "kvq::quantize in format ", f.name, ": append to a store that was calibrated");
  const Shape s{x.size(0), x.size(1), x.size(2), x.size(3)};
  TORCH_CHECK(s.dim % f.planes[0].per == 0, "kvq: head_dim ", s.dim, " cannot be packed in format ", f.name);
  std::vector<Tensor> store;
  for (int64_t i = 0; i < f.count; ++i) {
    const KnownPlane& p = f.planes[i];
    store.push_back(at::zeros(sizes_of(f, p, s), x.options().dtype(p.dtype ? scalar_of(p.dtype) : x.scalar_type())));
  }
  append_(store, at::arange(s.tokens, at::kLong), x, format);
  store.back().fill_(s.tokens);
  return store;
}

Tensor dequantize(TensorList store, c10::string_view format, at::ScalarType dtype) {
  const Known& f = known(format);
  const Shape s = shape_of(f, store);
  if (f.lossless) return store[0].to(dtype, false, true).contiguous();
  Tensor out = at::empty({s.batch, s.heads, s.tokens, s.dim}, at::TensorOptions().dtype(dtype));
  if (out.numel() == 0) return out;
  const kvq::DequantizeArgs args{side_of(f, store), static_cast<char*>(out.data_ptr()), dtype_of(out),
                                 at::get_num_threads()};
  TORCH_CHECK(kvq_dequantize(&args) == 0, "kvq::dequantize: not enough memory");
  return out;
}

// What attention does once the sides are known; `args` has them.
Tensor attend(kvq::AttentionArgs args, const Tensor& query, int64_t value_dim, const std::optional<Tensor>& mask, bool causal,
              std::optional<double> scale, int64_t window, double softcap, const std::optional<Tensor>& sinks, bool use_length) {
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), tokens = args.key.tokens;
  TORCH_CHECK(batch == args.key.batch && query.size(3) == args.key.dim && window >= 0 && softcap >= 0 &&
                  (args.key.heads ? heads % args.key.heads : heads) == 0,
              "kvq::attention of query ", query.sizes(), " over stores that do not fit it");
  Tensor out = at::zeros({batch, heads, queries, value_dim}, query.options());
  if (out.numel() == 0 || tokens == 0) return out;
  args.query = plane_of(query, "BHTD");
  Tensor open;  // the mask as it is, over all axes
  if (mask) {
    open = mask->expand({batch, heads, queries, tokens});
    TORCH_CHECK(open.scalar_type() == at::kBool || open.is_floating_point(), "kvq::attention: the mask is ", open.scalar_type());
    args.mask = plane_of(open, "BHTD");
  }
  if (sinks) {
    TORCH_CHECK(sinks->sizes() == at::IntArrayRef({heads}) && sinks->is_floating_point(), "kvq::attention: wrong sinks");
    args.sinks = plane_of(*sinks, "H");
  }
  args.out = static_cast<char*>(out.data_ptr());
  args.query_heads = heads, args.queries = queries, args.causal = causal, args.window = window;
  args.use_length = use_length, args.threads = at::get_num_threads();
  args.scale = scale ? *scale : 1.0 / std::sqrt(double(args.key.dim)), args.softcap = softcap;
  TORCH_CHECK(kvq_attention(&args) == 0, "kvq::attention: not enough memory");
  return out;
}

Tensor attention(const Tensor& query, TensorList key_store, TensorList value_store, c10::string_view key_format,
                 c10::string_view value_format, const std::optional<Tensor>& mask, bool causal,
                 std::optional<double> scale, int64_t window, double softcap, const std::optional<Tensor>& sinks,
                 bool use_length) {
  const Known &kf = known(key_format), &vf = known(value_format);
  check_values(query, "query");
  const Shape k = shape_of(kf, key_store), v = shape_of(vf, value_store);
  TORCH_CHECK(k.batch == v.batch && k.heads == v.heads && k.tokens == v.tokens, "kvq::attention over keys and values that differ");
  kvq::AttentionArgs args{};
  args.key = side_of(kf, key_store), args.value = side_of(vf, value_store);
  return attend(args, query, v.dim, mask, causal, scale, window, softcap, sinks, use_length);
}

// Pages of a pool as the sequences of a table; `length`, where there is one, is theirs.
kvq::Side pages_of(const Known& f, TensorList pages, const Tensor& table, const Tensor* length) {
  TORCH_CHECK(!f.windowed && f.numbers[3] == 1, "kvq: format ", f.name, " does not fit pages: its tokens wait, or share scales");
  kvq::Side side = side_of(f, pages);
  side.table_of_pages = plane_of(table, "BT"), side.page_tokens = side.tokens;
  side.batch = table.size(0), side.tokens = table.size(1) * side.page_tokens;
  if (length) side.length = plane_of(*length, "B");
  return side;
}

// The table as int64, every entry a page of `pages` or below zero.
Tensor checked_table(const Tensor& table, int64_t pages, int64_t batch) {
  TORCH_CHECK(table.dim() == 2 && table.size(0) == batch && (table.scalar_type() == at::kLong || table.scalar_type() == at::kInt),
              "kvq: block_table must be integers [", batch, ", N], got ", table.scalar_type(), " ", table.sizes());
  const Tensor wide = table.to(at::kLong).contiguous();
  for (int64_t i = 0; i < wide.numel(); ++i)
    TORCH_CHECK(wide.data_ptr<int64_t>()[i] < pages, "kvq: block_table names page ", wide.data_ptr<int64_t>()[i], " of ", pages);
  return wide;
}

void paged_append_(TensorList pages, const Tensor& block_table, const Tensor& position, const Tensor& x, c10::string_view format) {
  const Known& f = known(format);
  const Shape s = shape_of(f, pages);
  check_append(f, s, pages, x, x.dim() ? x.size(0) : 0, "kvq::paged_append_");
  const int64_t batch = x.size(0), count = x.size(2);
  TORCH_CHECK((position.scalar_type() == at::kLong || position.scalar_type() == at::kInt) &&
                  position.sizes() == at::IntArrayRef({batch, count}),
              "kvq::paged_append_ position must be integers [", batch, ", ", count, "], got ", position.sizes());
  const Tensor table = checked_table(block_table, s.batch, batch), wide = position.to(at::kLong).contiguous();
  if (x.numel() == 0) return;
  for (int64_t i = 0; i < wide.numel(); ++i) {
    const int64_t p = wide.data_ptr<int64_t>()[i];
    TORCH_CHECK(p < table.size(1) * s.tokens && (p < 0 || table.data_ptr<int64_t>()[i / count * table.size(1) + p / s.tokens] >= 0),
                "kvq::paged_append_ at ", p, ": the sequence has no page there");
  }
  const kvq::AppendArgs args{pages_of(f, pages, table, nullptr), plane_of(x, "BHTD"), plane_of(wide, "BT"), count,
                             at::get_num_threads()};
  TORCH_CHECK(kvq_append(&args) == 0, "kvq::paged_append_: not enough memory");
}

Tensor paged_attention(const Tensor& query, TensorList key_pages, TensorList value_pages, const Tensor& block_table,
                       const Tensor& length, c10::string_view key_format, c10::string_view value_format,
                       const std::optional<Tensor>& mask, bool causal, std::optional<double> scale, int64_t window, double softcap,
                       const std::optional<Tensor>& sinks) {
  const Known &kf = known(key_format), &vf = known(value_format);
  check_values(query, "query");
  const Shape k = shape_of(kf, key_pages), v = shape_of(vf, value_pages);
  TORCH_CHECK(k.batch == v.batch && k.heads == v.heads && k.tokens == v.tokens, "kvq::paged_attention over keys and values that differ");
  const int64_t batch = query.size(0);
  const Tensor table = checked_table(block_table, k.batch, batch), lengths = length.to(at::kLong).contiguous();
  TORCH_CHECK(lengths.sizes() == at::IntArrayRef({batch}), "kvq::paged_attention length must be [", batch, "], got ", length.sizes());
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t n = lengths.data_ptr<int64_t>()[b];
    TORCH_CHECK(n >= 0 && n <= table.size(1) * k.tokens, "kvq::paged_attention length ", n, " of ", table.size(1), " pages");
    for (int64_t i = 0; i * k.tokens < n; ++i)
      TORCH_CHECK(table.data_ptr<int64_t>()[b * table.size(1) + i] >= 0, "kvq::paged_attention: no page for tokens that count");
  }
  kvq::AttentionArgs args{};
  args.key = pages_of(kf, key_pages, table, &lengths), args.value = pages_of(vf, value_pages, table, &lengths);
  return attend(args, query, v.dim, mask, causal, scale, window, softcap, sinks, true);
}

}  // namespace

// Where Python has defined the operators, they are only given a kernel.
TORCH_LIBRARY_FRAGMENT(kvq, m) {
  if (c10::Dispatcher::singleton().findSchema({"kvq::attention", ""})) return;
  m.def("quantize(Tensor x, str format) -> Tensor[]");
  m.def("dequantize(Tensor[] store, str format, ScalarType dtype) -> Tensor");
  m.def("append_(Tensor(a!)[] store, Tensor position, Tensor x, str format) -> ()");
  m.def(
      "attention(Tensor query, Tensor[] key_store, Tensor[] value_store, str key_format, str value_format, *, "
      "Tensor? mask=None, bool causal=False, float? scale=None, int window=0, float softcap=0.0, "
      "Tensor? sinks=None, bool use_length=True) -> Tensor");
  m.def("paged_append_(Tensor(a!)[] pages, Tensor block_table, Tensor position, Tensor x, str format) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor[] key_pages, Tensor[] value_pages, Tensor block_table, Tensor length, "
      "str key_format, str value_format, *, Tensor? mask=None, bool causal=False, float? scale=None, int window=0, "
      "float softcap=0.0, Tensor? sinks=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("quantize", quantize);
  m.impl("dequantize", dequantize);
  m.impl("append_", append_);
  m.impl("attention", attention);
  m.impl("paged_append_", paged_append_);
  m.impl("paged_attention", paged_attention);
}
