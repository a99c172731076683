// y = f(x) W^T for few rows, W packed in the order of the tensor core's operand registers: see packed_weight.py for the
// equations and the layout, linear_cuda.py for the launch.
//
// A block stays for many groups of R tiles of 16 outputs, and for fewer tiles in the end, so that no block has more than
// one tile above the others; SPLIT slices of K are blocks of their own, and a block's warps split its slice. Each warp
// reads its part of x once and keeps it in registers (STREAM: too large, read again for each group). A lane copies
// weights to its own slots of a ring (cp.async) and reads only those, so STAGES steps of 64 inputs are in flight, across
// groups, without a barrier; EARLY: it reads a step's while it multiplies those of the step before. One barrier a group
// adds the warps up. Weights do not depend on the kernel before: they are asked for before its end is awaited. The order
// of the sums depends on STEPS, WARPS and SPLIT alone, so a row's result is the same bits whatever rows stand beside it.
//
// Nibbles are not centred one by one: n = q + 8 goes in as 128 + n, which is one `lop3`, and the sum over a group starts
// at -136 times the sum of the group's x. Sums are about 20 times larger for that, in float32: an error of 1e-5.
//
// Compile-time: BITS 4|8|16, GROUP inputs a scale, ASYM, STEPS = K / 64, SPLIT, WARPS, R, NT tiles of 8 rows, STAGES,
// BLOCKS on a multiprocessor, STREAM, EARLY, and what is fused: NORM, GATED, RESIDUAL, TOP1, TAIL (more outputs, of 16-bit
// weights, by blocks of their own; with BITS 4).

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct alignas(16) Quad { u32 v[4]; };
struct alignas(8) Pair { u32 v[2]; };
struct alignas(16) Sums { float v[4]; };  // of lane 4 g + t: (output g, rows 2 t and 2 t + 1), then of output g + 8

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
// What an earlier kernel wrote is read by `ld.global` behind the wait: never through the read-only path.
extern __shared__ Quad shared_memory[];

DEVICE Quad load_quad(const u16* p) {
  Quad q;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p) : "memory");
  return q;
}
DEVICE u16 load_half(const u16* p) {
  u16 half;
  asm volatile("ld.global.u16 %0,[%1];" : "=h"(half) : "l"(p) : "memory");
  return half;
}
DEVICE Sums load_shared_by_blocks(const Sums* p) {  // from L2, where other multiprocessors' writes are
  Sums s;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(s.v[0]), "=f"(s.v[1]), "=f"(s.v[2]), "=f"(s.v[3]) : "l"(p) : "memory");
  return s;
}
DEVICE float load_shared_by_blocks(const float* p) {
  float f;
  asm volatile("ld.global.cg.f32 %0,[%1];" : "=f"(f) : "l"(p) : "memory");
  return f;
}
template <int BYTES> DEVICE void copy_async(void* to, const void* from) {
  u32 at = (u32)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(at), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE u32 nibbles(u32 word) {  // two bf16, each 128 + a nibble
  u32 r;
  asm("lop3.b32 %0,%1,0x000F000F,0x43004300,0xEA;" : "=r"(r) : "r"(word));
  return r;
}
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEVICE u32 to_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }  // off by 1e-5 of it at most; bf16 is by 4e-3
DEVICE u32 to_e4m3x2(float low, float high) {
  u16 r = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(high), "f"(low));
#endif
  return r;
}
template <typename T> DEVICE void keep(T*& pointer) { asm volatile("" : "+l"(pointer)); }  // and compute it once
DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

template <int N> struct Number { static constexpr int value = N; };
#define INLINE __attribute__((always_inline))

DEVICE float low(u32 pair) { return as_float(pair << 16); }
DEVICE float high(u32 pair) { return as_float(pair & 0xFFFF0000u); }

#define THREADS (WARPS * 32)
#define VECS (BITS == 16 ? 4 : BITS / 4)
#define SCALED (BITS < 16)
#define GROUPS (SCALED && GROUP == 32 ? 2 : 1)  // scale groups in a step of 64 inputs
#define WORDS (GROUPS * (ASYM ? 2 : 1))         // of a lane for a step and tile: scales, then shifts
#define WIDE (GROUP > 64 ? GROUP / 64 : 1)      // steps that share a scale
#define PARTS (SPLIT * WARPS)
#define KSTEPS ((STEPS + PARTS - 1) / PARTS)  // of a warp, at most
#define SLOT (R * VECS * 32)                    // of the ring, in `Quad`s
#define SCALE_SLOT (R * 32 * WORDS)
#define ITEMS (R * NT)                        // of 16 outputs x 8 rows in a group: a warp's sums are one `Sums` a lane
#define OWN ((ITEMS + WARPS - 1) / WARPS)     // of these a warp finishes

struct Taken {  // a step's weights in registers
  Quad words[R][VECS];
  u32 scales[R][SCALED ? WORDS : 1];
};

// y = x W^T, NORM: of x * norm_weight with 1 / rms(x) applied at the end; GATED: a tile's first 8 outputs are gates of
// its last 8; RESIDUAL: added; TOP1: only the largest score of each row and where it is, one for each block and row.
// SPLIT > 1: `partial` has [row blocks, tiles, SPLIT] of NT * 32 Sums, then as many of NT * 8 sums of squares; `arrived`
// [row blocks, tiles], zero before and after, counts the slices of a group (at its first tile) that are there. The last
// to come adds them in order.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) packed_linear(
    const Quad* __restrict__ weight, const u32* __restrict__ scales, const u16* __restrict__ x_all,
    const u16* __restrict__ norm_weight, const u16* __restrict__ residual, u16* __restrict__ y,
    float* __restrict__ best_score, i64* __restrict__ best_id, const Quad* __restrict__ tail, Sums* partial, int* arrived,
    float eps, int M_all, int N, int tail_N, int x_stride, int residual_stride, int y_stride) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tiles = (N + 15) / 16;
  const int first_row = blockIdx.y * NT * 8, M = M_all - first_row < NT * 8 ? M_all - first_row : NT * 8;
  const u16* x = x_all + (i64)first_row * x_stride;
  const int slice = SPLIT > 1 ? blockIdx.x % SPLIT : 0, part = slice * WARPS + warp;
  const int k_begin = STEPS * part / PARTS, count = STEPS * (part + 1) / PARTS - k_begin;
#define HAS(s) (STEPS % PARTS == 0 || (s) < count)

  Quad* ring = shared_memory + warp * (STAGES * R * VECS * 32) + lane;
  u32* ring_scales = (u32*)(shared_memory + WARPS * STAGES * R * VECS * 32) + (warp * STAGES * R * 32 + lane) * WORDS;
  Sums* sums = (Sums*)(shared_memory + WARPS * STAGES * R * VECS * 32 + (SCALED ? WARPS * STAGES * R * 8 * WORDS : 0));
  Sums* starts = sums + 2 * WARPS * ITEMS * 32;  // [warp][step][scale group][n][t]
  Quad* norms = (Quad*)(starts + (SCALED ? WARPS * KSTEPS * GROUPS * NT * 4 : 0));
  float* squares = (float*)(norms + (NORM ? WARPS * KSTEPS * 8 : 0));  // [WARPS][NT * 8]
  float* inverse = squares + WARPS * NT * 8;                           // [NT * 8], 1 / rms
  starts += warp * (KSTEPS * GROUPS * NT * 4), norms += warp * (KSTEPS * 8);

#if TAIL  // the first blocks; their steps of 64 inputs are four slots, one for each j
  const int tail_tiles = (tail_N + 15) / 16, tail_groups = (tail_tiles + R - 1) / R;
  const bool in_tail = (int)blockIdx.x < tail_groups;
  const int first = in_tail ? blockIdx.x : blockIdx.x - tail_groups, stride = in_tail ? tail_groups : gridDim.x - tail_groups;
  auto ask_tail = [&](int i) {  // i = 4 step + j
    if (HAS(i / 4))
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int tile = first + r * stride < tail_tiles ? first + r * stride : tail_tiles - 1;
        copy_async<16>(ring + (i % STAGES * R + r) * 32, tail + (((i64)tile * STEPS + k_begin) * 4 + i) * 32 + lane);
      }
  };
#else
  constexpr bool in_tail = false;
  const int first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;
#endif
  auto tile_at = [&](int round, int r) { return first + (round * R + r) * stride; };

  // Where a group's weights lie: worked out once a group, so that a step's copies need no arithmetic.
  const Quad* from[R];
  const u32* from_scales[R];
  int there = 0;  // tiles of the group
  auto aim = [&](int round) {
    there = 0;
#pragma unroll
    for (int r = 0; r < R; r++) {
      const int tile = tile_at(round, r);
      there += tile < tiles;
      from[r] = weight + ((i64)tile * STEPS + k_begin) * (VECS * 32) + lane;
      from_scales[r] = SCALED ? scales + (((i64)tile * (STEPS / WIDE) + k_begin / WIDE) * 8 + g) * WORDS : nullptr;
      keep(from[r]), keep(from_scales[r]);
    }
  };
  auto ask = [&](int s, Quad* to, u32* to_scales) {
#pragma unroll
    for (int r = 0; r < R; r++)
      if (HAS(s) && r < there) {
#pragma unroll
        for (int v = 0; v < VECS; v++) copy_async<16>(to + (r * VECS + v) * 32, from[r] + (s * VECS + v) * 32);
#if SCALED
        copy_async<WORDS * 4>(to_scales + r * 32 * WORDS, from_scales[r] + (k_begin % WIDE + s) / WIDE * 8 * WORDS);
#endif
      }
  };

#if NORM
  for (int i = lane; i < count * 8; i += 32) copy_async<16>(norms + i, norm_weight + k_begin * 64 + i * 8);
#endif
  commit_copies();
#pragma unroll
  for (int i = 0; i < STAGES; i++) {
#if TAIL
    if (in_tail) {
      if (i < KSTEPS * 4) ask_tail(i);
    } else
#endif
    {
      if (i % KSTEPS == 0) aim(i / KSTEPS);
      ask(i % KSTEPS, ring + i * SLOT, ring_scales + i * SCALE_SLOT);
    }
    commit_copies();
  }
  let_next_kernel_start();
  await_kernel_before();

  const u16* rows[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) rows[n] = x + (i64)(n * 8 + g < M ? n * 8 + g : M - 1) * x_stride + k_begin * 64 + t * 8;
  auto load = [&](int s, u32(&b)[NT][8]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const Quad q = load_quad(rows[n] + s * 64 + h * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) b[n][h * 4 + i] = q.v[i];
      }
  };
  auto weigh = [&](int s, u32(&b)[NT][8]) {
#if NORM
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const Quad q = norms[s * 8 + h * 4 + t];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) b[n][h * 4 + i] = fma2(b[n][h * 4 + i], q.v[i], 0x80008000u);
    }
#endif
  };

#if STREAM
  u32 xs[1][NT][8], ahead[NT][8];
#define HELD(s) 0
#else
  u32 xs[KSTEPS][NT][8];
#define HELD(s) (s)
#pragma unroll
  for (int s = 0; s < KSTEPS; s++)
    if (HAS(s)) load(s, xs[s]);
#endif
#if NORM
  await_copies<STAGES>();
  __syncthreads();
  float gram[NT][4] = {};
#endif
#if STREAM
#pragma unroll 1
#else
#pragma unroll
#endif
  for (int s = 0; s < KSTEPS; s++) {
    if (!HAS(s)) continue;
    u32(&b)[NT][8] = xs[HELD(s)];
#if STREAM
    load(s, b);
#endif
#if NORM
#pragma unroll
    for (int j = 0; j < 4; j++)  // x x^T by the tensor core: its diagonal has the sums of squares
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int even = n & ~1, odd = n | 1;
        mma(gram[n], b[even][j * 2], odd < NT ? b[odd % NT][j * 2] : 0, b[even][j * 2 + 1],
            odd < NT ? b[odd % NT][j * 2 + 1] : 0, b[n][j * 2], b[n][j * 2 + 1]);
      }
#endif
    weigh(s, b);
#if SCALED
#pragma unroll
    for (int q = 0; q < GROUPS; q++)
#pragma unroll
      for (int n = 0; n < NT; n++) {  // sums of x over the group, for every output alike
        constexpr u32 start_of_one = ASYM ? 0x3F803F80u : BITS == 4 ? 0xC308C308u : 0xC310C310u;  // 1, -136, -144
        Sums start = {};
#pragma unroll
        for (int j = q * (4 / GROUPS); j < (q + 1) * (4 / GROUPS); j++)
          mma(start.v, start_of_one, start_of_one, start_of_one, start_of_one, b[n][j * 2], b[n][j * 2 + 1]);
        if (g == 0) starts[((s * GROUPS + q) * NT + n) * 4 + t] = start;
      }
#endif
  }
#if NORM
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if ((i >> 1) == (n & 1) && g == t * 2 + (i & 1)) squares[warp * NT * 8 + n * 8 + g] = gram[n][i];
#endif
  __syncthreads();
#if NORM
  if (threadIdx.x < NT * 8) {  // read behind the barrier of a group
    float sum = 0;
    for (int w = 0; w < WARPS; w++) sum += squares[w * NT * 8 + threadIdx.x];
    inverse[threadIdx.x] = SPLIT == 1 ? rsqrtf(sum / (STEPS * 64) + eps) : sum;
  }
#endif

  auto add_warps = [&](int half, int item) {
    Sums total = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const Sums other = sums[((half * WARPS + w) * ITEMS + item) * 32 + lane];
#pragma unroll
      for (int i = 0; i < 4; i++) total.v[i] += other.v[i];
    }
    return total;
  };
  auto put = [&](int row, i64 column, float value) {
#if RESIDUAL
    value += low(load_half(residual + (i64)(first_row + row) * residual_stride + column));
#endif
    y[(i64)(first_row + row) * y_stride + column] = (u16)to_bf16x2(value, value);
  };
  auto finish = [&](int tile, int n, const Sums& total) {  // 8 rows of a tile
    const int row = n * 8 + t * 2;
#if GATED
    if (tile * 8 + g < N / 2)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (row + e < M)
          put(row + e, tile * 8 + g, silu(total.v[e]) * total.v[e + 2]);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = tile * 16 + g + (i >> 1) * 8;
#if TAIL
      if (row + (i & 1) < M && column < (in_tail ? tail_N : N))
        put(row + (i & 1), column + (in_tail ? N : 0), total.v[i]);
#else
      if (row + (i & 1) < M && column < N) put(row + (i & 1), column, total.v[i]);
#endif
    }
#endif
  };

#if TOP1
  float score[OWN][2];
  int id[OWN][2] = {};
  for (int c = 0; c < OWN; c++) score[c][0] = score[c][1] = -as_float(0x7F800000u);
#endif
  int half = 0, turn = 0, lead = 0;  // buffer of sums, slot, the warp that finishes the group's first item
  Quad* turned = ring;
  u32* turned_scales = ring_scales;
  auto turn_by = [&](int slots) {
    turn = turn + slots == STAGES ? 0 : turn + slots;
    turned = ring + turn * SLOT, turned_scales = ring_scales + turn * SCALE_SLOT;
  };
  auto slot_of = [](int s) {  // behind the turn's first
    return KSTEPS % STAGES == 0 ? s % STAGES : STAGES % KSTEPS == 0 ? s % KSTEPS : 0;
  };
  auto take = [&](auto number_of_tiles, int s, Taken& to) INLINE {
#pragma unroll
    for (int r = 0; r < decltype(number_of_tiles)::value; r++) {
#pragma unroll
      for (int v = 0; v < VECS; v++) to.words[r][v] = turned[slot_of(s) * SLOT + (r * VECS + v) * 32];
#if SCALED
#pragma unroll
      for (int w = 0; w < WORDS; w++) to.scales[r][w] = turned_scales[slot_of(s) * SCALE_SLOT + r * 32 * WORDS + w];
#endif
    }
  };
  auto refill = [&](int round, int s) INLINE {  // the slot of step s, with what comes STAGES steps later
    if ((s + STAGES) % KSTEPS == 0) aim(round + (s + STAGES) / KSTEPS);
    ask((s + STAGES) % KSTEPS, turned + slot_of(s) * SLOT, turned_scales + slot_of(s) * SCALE_SLOT);
    commit_copies();
    if (KSTEPS % STAGES && STAGES % KSTEPS) turn_by(1);
    if (STAGES > KSTEPS && STAGES % KSTEPS == 0 && s == KSTEPS - 1) turn_by(KSTEPS);
  };
#if EARLY
  Taken early;
  await_copies<STAGES - 1>();
  if (!in_tail) take(Number<R>(), 0, early);
#endif
#if STREAM
  if (count > 0) load(0, ahead);
#endif
  auto multiply = [&](auto number_of_tiles, int round) INLINE {
    constexpr int TILES = decltype(number_of_tiles)::value;  // of the group's R, to which room is given
    Sums acc[TILES][NT] = {};
#if STREAM
#pragma unroll 1
#else
#pragma unroll
#endif
    for (int s = 0; s < KSTEPS; s++) {
      u32(&b)[NT][8] = xs[HELD(s)];
#if STREAM
      if (HAS(s)) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 8; i++) b[n][i] = ahead[n][i];
        weigh(s, b);
        load(s + 1 < count ? s + 1 : 0, ahead);
      }
#endif
#if TAIL
      if (TILES == R && in_tail) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = s * 4 + j;
          if (HAS(s)) {
            await_copies<STAGES - 1>();
#pragma unroll
            for (int r = 0; r < TILES; r++) {
              const Quad a = ring[(i % STAGES * R + r) * 32];
#pragma unroll
              for (int n = 0; n < NT; n++) mma(acc[r][n].v, a.v[0], a.v[1], a.v[2], a.v[3], b[n][j * 2], b[n][j * 2 + 1]);
            }
          }
          if (i + STAGES < KSTEPS * 4) ask_tail(i + STAGES);
          commit_copies();
        }
        continue;
      }
#endif
      Taken now;
#if EARLY
      now = early;
      refill(round, s);
      await_copies<STAGES - 1>();
      take(Number<R>(), s + 1, early);
#endif
      if (HAS(s)) {
#if !EARLY
        await_copies<STAGES - 1>();
        take(number_of_tiles, s, now);
#endif
#pragma unroll
        for (int r = 0; r < TILES; r++) {
#if SCALED
          const u32* scale = now.scales[r];
#pragma unroll
          for (int q = 0; q < GROUPS; q++) {
            Sums p[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
              p[n] = starts[((s * GROUPS + q) * NT + n) * 4 + t];
#if ASYM
#pragma unroll
              for (int i = 0; i < 4; i++) p[n].v[i] *= i < 2 ? low(scale[GROUPS + q]) : high(scale[GROUPS + q]);
#endif
            }
#pragma unroll
            for (int v = 0; v < VECS; v++) {
#pragma unroll
              for (int j = q * (4 / GROUPS); j < (q + 1) * (4 / GROUPS); j++) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = nibbles(now.words[r][v].v[j] >> (4 * i));
#pragma unroll
                for (int n = 0; n < NT; n++) mma(p[n].v, a[0], a[1], a[2], a[3], b[n][j * 2], b[n][j * 2 + 1]);
              }
              if (v + 1 < VECS)  // q = 16 h + l: 16 (128 + h + 8 - 144) + 128 + l
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                  for (int i = 0; i < 4; i++) p[n].v[i] *= 16.0f;
            }
            const float s0 = low(scale[q]), s1 = high(scale[q]);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int i = 0; i < 4; i++) acc[r][n].v[i] += p[n].v[i] * (i < 2 ? s0 : s1);
          }
#else
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const Quad a = now.words[r][j];
#pragma unroll
            for (int n = 0; n < NT; n++) mma(acc[r][n].v, a.v[0], a.v[1], a.v[2], a.v[3], b[n][j * 2], b[n][j * 2 + 1]);
          }
#endif
        }
      }
#if !EARLY
      refill(round, s);
#endif
    }

    Sums* own = sums + (half * WARPS + warp) * ITEMS * 32 + lane;
#pragma unroll
    for (int r = 0; r < TILES; r++)
#pragma unroll
      for (int n = 0; n < NT; n++) own[(r * NT + n) * 32] = acc[r][n];
    __syncthreads();  // the other half is free again too: all have left it behind
#pragma unroll
    for (int c = 0; c < (TILES * NT + WARPS - 1) / WARPS; c++) {
      const int item = c * WARPS + (warp >= lead ? warp - lead : warp - lead + WARPS);
      if (item >= TILES * NT) continue;
      const int tile = tile_at(round, item / NT), n = item % NT;
      if (!in_tail && tile >= tiles) continue;
      Sums total = add_warps(half, item);
#if SPLIT > 1
      const i64 at = ((i64)blockIdx.y * tiles + tile) * SPLIT + slice;
      partial[(at * NT + n) * 32 + lane] = total;
#if NORM
      if (item == 0) {
        float* partial_squares = (float*)(partial + (i64)gridDim.y * tiles * SPLIT * NT * 32) + at * NT * 8;
        for (int row = lane; row < NT * 8; row += 32) partial_squares[row] = inverse[row];
      }
#endif
#else
#if NORM
#pragma unroll
      for (int i = 0; i < 4; i++) total.v[i] *= inverse[n * 8 + t * 2 + (i & 1)];
#endif
#if TOP1
#pragma unroll
      for (int i = 0; i < 4; i++) {  // ids grow, so the first of equals stays
        const int output = tile * 16 + g + (i >> 1) * 8;
        if (output < N && total.v[i] > score[c][i & 1]) score[c][i & 1] = total.v[i], id[c][i & 1] = output;
      }
#else
      finish(tile, n, total);
#endif
#endif
    }
    half ^= 1;
    if (!TOP1 && TILES * NT < WARPS) lead = (lead + TILES * NT) % WARPS;
  };
  if (in_tail)
    multiply(Number<R>(), 0);
  else
    for (int round = 0; tile_at(round, 0) < tiles; round++)
      if (tile_at(round, R - 1) < tiles)
        multiply(Number<R>(), round);
      else
        multiply(Number<(R > 1 ? R - 1 : 1)>(), round);
  await_copies<0>();

#if SPLIT > 1
  const int done = first < tiles ? (tiles - first + R * stride - 1) / (R * stride) : 0;  // groups
  int* last = (int*)sums;
  __threadfence();
  for (int base = 0; base < done; base += THREADS) {
    const int here = done - base < THREADS ? done - base : THREADS;
    __syncthreads();
    if ((int)threadIdx.x < here) {
      int* counter = arrived + (i64)blockIdx.y * tiles + tile_at(base + threadIdx.x, 0);
      last[threadIdx.x] = atomicAdd(counter, 1) == SPLIT - 1;
      if (last[threadIdx.x]) *counter = 0;
      __threadfence();
    }
    __syncthreads();
    for (int i = warp; i < here * ITEMS; i += WARPS) {
      if (!last[i / ITEMS]) continue;
      const int round = base + i / ITEMS, tile = tile_at(round, i % ITEMS / NT), n = i % NT;
      if (tile >= tiles) continue;
      const i64 at = ((i64)blockIdx.y * tiles + tile) * SPLIT;
      Sums slices[SPLIT], total = {};
#pragma unroll
      for (int z = 0; z < SPLIT; z++) slices[z] = load_shared_by_blocks(partial + ((at + z) * NT + n) * 32 + lane);
#pragma unroll
      for (int z = 0; z < SPLIT; z++)
#pragma unroll
        for (int e = 0; e < 4; e++) total.v[e] += slices[z].v[e];
#if NORM
      const i64 of_group = ((i64)blockIdx.y * tiles + tile_at(round, 0)) * SPLIT;
      const float* partial_squares = (float*)(partial + (i64)gridDim.y * tiles * SPLIT * NT * 32) + of_group * NT * 8;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float sum = 0;
        for (int z = 0; z < SPLIT; z++)
          sum += load_shared_by_blocks(partial_squares + (z * NT + n) * 8 + t * 2 + e);
        const float factor = rsqrtf(sum / (STEPS * 64) + eps);
        total.v[e] *= factor, total.v[e + 2] *= factor;
      }
#endif
      finish(tile, n, total);
    }
  }
#endif

#if TOP1
  __syncthreads();
  float* top_score = (float*)sums;  // [R][NT * 8]
  int* top_id = (int*)(top_score + R * NT * 8);
#pragma unroll
  for (int c = 0; c < OWN; c++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      for (int distance = 16; distance >= 4; distance >>= 1) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, score[c][e], distance);
        const int other_id = __shfl_xor_sync(0xFFFFFFFFu, id[c][e], distance);
        if (other > score[c][e] || (other == score[c][e] && other_id < id[c][e]))
          score[c][e] = other, id[c][e] = other_id;
      }
      const int item = c * WARPS + warp, at = item * 8 + t * 2 + e;  // = (item / NT) * NT * 8 + row
      if (g == 0 && item < ITEMS) top_score[at] = score[c][e], top_id[at] = id[c][e];
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < M; row += THREADS) {
    int best = row;
    for (int at = row + NT * 8; at < R * NT * 8; at += NT * 8)
      if (top_score[at] > top_score[best] || (top_score[at] == top_score[best] && top_id[at] < top_id[best])) best = at;
    const i64 at = (i64)(first_row + row) * gridDim.x + blockIdx.x;
    best_score[at] = top_score[best], best_id[at] = top_id[best];
  }
#endif
}

// The best of `parts` candidates of each row (one block a row); the lowest id among equals.
extern "C" __global__ void __launch_bounds__(256) best_of_parts(
    const float* part_score, const i64* part_id, float* score_M, i64* id_M, int parts) {
  float* scores = (float*)shared_memory;
  i64* ids = (i64*)(scores + 256);
  let_next_kernel_start();
  await_kernel_before();
  float score = -as_float(0x7F800000u);
  i64 id = 0x7FFFFFFFFFFFFFFFLL;
  for (int i = threadIdx.x; i < parts; i += 256) {
    const float other = part_score[(i64)blockIdx.x * parts + i];
    const i64 other_id = part_id[(i64)blockIdx.x * parts + i];
    if (other > score || (other == score && other_id < id)) score = other, id = other_id;
  }
  scores[threadIdx.x] = score, ids[threadIdx.x] = id;
  __syncthreads();
  for (int half = 128; half; half >>= 1) {
    if ((int)threadIdx.x < half) {
      const float other = scores[threadIdx.x + half];
      const i64 other_id = ids[threadIdx.x + half];
      if (other > scores[threadIdx.x] || (other == scores[threadIdx.x] && other_id < ids[threadIdx.x]))
        scores[threadIdx.x] = other, ids[threadIdx.x] = other_id;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) score_M[blockIdx.x] = scores[0], id_M[blockIdx.x] = ids[0];
}

// w [N, K] from the packed weight, each number rounded once to bf16, a warp for each tile and step of 64 inputs: a lane
// puts eight of a row at once, where they begin. Rows of a GATED weight come where they came from, gates first.
template <typename Put> DEVICE void unpack_eights(const Quad* weight, const u32* scales, int N, int K, Put put) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, steps = K / 64, tiles = (N + 15) / 16;
  const i64 at = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
  if (at >= (i64)tiles * steps) return;
  const int tile = (int)(at / steps), k = (int)(at % steps);
  Quad q[VECS];
  for (int v = 0; v < VECS; v++) q[v] = weight[(at * VECS + v) * 32 + lane];
  for (int half = 0; half < 2; half++) {
    int row = tile * 16 + g + half * 8;
    if (row >= N) continue;
    if (GATED) row = tile * 8 + g + half * (N / 2);
    for (int part = 0; part < 2; part++) {
      Quad eight;
#if SCALED
      const u32* s = scales + (((i64)tile * (steps / WIDE) + k / WIDE) * 8 + g) * WORDS;
      const u32 pair = s[part * (GROUPS - 1)], shifts = ASYM ? s[GROUPS + part * (GROUPS - 1)] : 0;
      const float scale = half ? high(pair) : low(pair);
      const float zero = ASYM ? -136.0f - (half ? high(shifts) : low(shifts)) : 0.0f;
      float value[8];
      for (int e = 0; e < 8; e++) {
        const int j = part * 2 + (e >> 2), c = e & 3;
        const int shift = 4 * (half + (c & 2)) + 16 * (c & 1);
        const int nibble = (int)(q[0].v[j] >> shift & 15u) - 8;
#if BITS == 4
        value[e] = (nibble - zero) * scale;
#else
        value[e] = (nibble * 16 + (int)(q[VECS - 1].v[j] >> shift & 15u)) * scale;
#endif
      }
      for (int i = 0; i < 4; i++) eight.v[i] = to_bf16x2(value[2 * i], value[2 * i + 1]);
#else
      for (int i = 0; i < 4; i++) eight.v[i] = q[(part * 2 + (i >> 1)) % VECS].v[half + 2 * (i & 1)];
#endif
      put(row, (i64)row * K + k * 64 + part * 32 + t * 8, eight);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) unpack(const Quad* __restrict__ weight, const u32* __restrict__ scales,
                                                          u16* __restrict__ dense, int N, int K) {
  unpack_eights(weight, scales, N, K, [&](int, i64 at, const Quad& eight) { *(Quad*)(dense + at) = eight; });
}

// e4m3(w / scale), a scale for each row; from sm_89 on.
extern "C" __global__ void __launch_bounds__(256) unpack_e4m3(
    const Quad* __restrict__ weight, const u32* __restrict__ scales, const float* __restrict__ row_scale_N,
    unsigned char* __restrict__ q, int N, int K) {
  unpack_eights(weight, scales, N, K, [&](int row, i64 at, const Quad& eight) {
    const float factor = 1.0f / row_scale_N[row];
    Pair out = {};
    for (int i = 0; i < 4; i++)
      out.v[i >> 1] |= to_e4m3x2(low(eight.v[i]) * factor, high(eight.v[i]) * factor) << 16 * (i & 1);
    *(Pair*)(q + at) = out;
  });
}
