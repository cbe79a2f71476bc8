// Sixteen codes at once on ARM: four vectors from one load, since widening bytes shares most of its work between them.
#pragma once
#include "vec.h"

#if defined(KVQ_NEON)
namespace kvq {

// A table of 16 floats as four tables of bytes: entry i is bytes i of all four.
using Entries = uint8x16x4_t;

inline Entries entries_of(const float* table) { return vld4q_u8(reinterpret_cast<const uint8_t*>(table)); }

inline void from_integers(int16x8_t low, int16x8_t high, vf* x) {
  x[0] = (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
  x[1] = (vf)vcvtq_f32_s32(vmovl_high_s16(low));
  x[2] = (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
  x[3] = (vf)vcvtq_f32_s32(vmovl_high_s16(high));
}

inline void from_halves(uint16x8_t low, uint16x8_t high, vf* x) {
  const float16x8_t a = vreinterpretq_f16_u16(low), b = vreinterpretq_f16_u16(high);
  x[0] = (vf)vcvt_f32_f16(vget_low_f16(a));
  x[1] = (vf)vcvt_high_f32_f16(a);
  x[2] = (vf)vcvt_f32_f16(vget_low_f16(b));
  x[3] = (vf)vcvt_high_f32_f16(b);
}

// Entries number `index`, each below 16: its bytes are looked up apart and zipped.
inline void from_entries(const Entries& table, uint8x16_t index, vf* x) {
  const uint8x16_t a = vqtbl1q_u8(table.val[0], index), b = vqtbl1q_u8(table.val[1], index);
  const uint8x16_t c = vqtbl1q_u8(table.val[2], index), d = vqtbl1q_u8(table.val[3], index);
  const uint16x8_t ab = vreinterpretq_u16_u8(vzip1q_u8(a, b)), ab2 = vreinterpretq_u16_u8(vzip2q_u8(a, b));
  const uint16x8_t cd = vreinterpretq_u16_u8(vzip1q_u8(c, d)), cd2 = vreinterpretq_u16_u8(vzip2q_u8(c, d));
  x[0] = (vf)vzip1q_u16(ab, cd);
  x[1] = (vf)vzip2q_u16(ab, cd);
  x[2] = (vf)vzip1q_u16(ab2, cd2);
  x[3] = (vf)vzip2q_u16(ab2, cd2);
}

inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Packed codes as bytes. Bits of neighbouring codes may stay above a code, as far as a periodic table of 16 entries bears them.
inline uint8x16_t indices4(const uint8_t* p) {
  const uint8x8_t both = vld1_u8(p), low = vand_u8(both, vdup_n_u8(15)), high = vshr_n_u8(both, 4);
  return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}

inline uint8x16_t indices3(const uint8_t* p) {
  // Six bytes, the middle two twice: code i begins at bit 3 i of them. Two bytes hold all of a code, the first of them at most 7 bits before.
  const uint32x2_t words = vset_lane_u32(word_at(p + 2), vdup_n_u32(word_at(p)), 1);
  const uint8x16_t bytes = vcombine_u8(vreinterpret_u8_u32(words), vdup_n_u8(0));
  const uint8x16_t low = {0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 3, 2, 3};
  const uint8x16_t high = {3, 6, 3, 6, 3, 6, 6, 7, 6, 7, 6, 7, 7, 8, 7, 8};  // byte 8 is zero
  const int16x8_t shift = {0, -3, -6, -1, -4, -7, -2, -5};
  const uint16x8_t a = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(bytes, low)), shift);
  const uint16x8_t b = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(bytes, high)), shift);
  return vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b)), vdupq_n_u8(7));
}

inline uint8x16_t indices2(const uint8_t* p) {
  const uint8x16_t spread = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const int8x16_t shift = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
  const uint8x16_t bytes = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(word_at(p))), spread);
  return vandq_u8(vshlq_u8(bytes, shift), vdupq_n_u8(15));
}

// Sixteen codes at channel 16 * i.
template <int CODE>
inline void get16(const uint8_t* row, int64_t i, const Entries& table, vf* x) {
  if constexpr (CODE == INT8) {
    const int8x16_t c = vreinterpretq_s8_u8(vld1q_u8(row + 16 * i));
    from_integers(vmovl_s8(vget_low_s8(c)), vmovl_high_s8(c), x);
  } else if constexpr (CODE == UINT8) {
    const uint8x16_t c = vld1q_u8(row + 16 * i);
    from_integers(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(c))), vreinterpretq_s16_u16(vmovl_high_u8(c)), x);
  } else if constexpr (CODE == FLOAT_E4M3) {
    // As in from_e4m3: the sign is shifted twice, and taken out where it is none.
    const int8x16_t c = vreinterpretq_s8_u8(vld1q_u8(row + 16 * i));
    const uint16x8_t keep = vdupq_n_u16(0xbfff);
    from_halves(vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(c), 7)), keep),
                vandq_u16(vreinterpretq_u16_s16(vshll_high_n_s8(c, 7)), keep), x);
    KVQ_UNROLL for (int k = 0; k < 4; ++k) x[k] *= 256.0f;
  } else if constexpr (CODE == FLOAT_E5M2) {
    const uint8x16_t c = vld1q_u8(row + 16 * i);
    from_halves(vshll_n_u8(vget_low_u8(c), 8), vshll_high_n_u8(c, 8), x);
  } else {
    constexpr int BITS = CODE == TABLE4 ? 4 : CODE == TABLE3 ? 3 : 2;
    const uint8_t* p = row + 2 * BITS * i;
    from_entries(table, BITS == 4 ? indices4(p) : BITS == 3 ? indices3(p) : indices2(p), x);
  }
}

}  // namespace kvq
#endif
