// y = f(x) W^T for few rows, W packed in the order of the tensor core's operand registers: see packed_weight.py for the
// equations and the layout, linear_cuda.py for the launch.
//
// A block takes R tiles of 16 outputs, its warps split K and add up through shared memory. A lane copies to its own slots
// of a ring (cp.async) and reads only those, so the loop over K has no barrier and STAGES steps of 64 inputs are in
// flight. Weights do not depend on the kernel before: they are asked for before its end is awaited. The order of the sums
// depends on WARPS and K alone, so a row's result is the same bits whatever rows stand beside it.
//
// Compile-time: BITS 4|8|16, GROUP inputs a scale, ASYM, WARPS, R, NT tiles of 8 rows, STAGES, and what is fused: NORM,
// GATED, RESIDUAL, TOP1, TAIL (more outputs, of 16-bit weights, by blocks of their own; with BITS 4).

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct alignas(16) Quad { u32 v[4]; };

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
// What an earlier kernel wrote is read by `ld.global` behind the wait: never through the read-only path.
extern __shared__ Quad shared_memory[];

DEVICE Quad load_quad(const u16* p) {
  Quad q;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(q.v[0]), "=r"(q.v[1]), "=r"(q.v[2]), "=r"(q.v[3]) : "l"(p) : "memory");
  return q;
}
DEVICE u32 load_word(const u16* p) {
  u32 word;
  asm volatile("ld.global.u32 %0,[%1];" : "=r"(word) : "l"(p) : "memory");
  return word;
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
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
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

DEVICE float low(u32 pair) { return as_float(pair << 16); }
DEVICE float high(u32 pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE u32 both(u32 half) { return half | half << 16; }
DEVICE float widen(u16 x) { return as_float((u32)x << 16); }

#define THREADS (WARPS * 32)
#define VECS (BITS / 4)
#if BITS == 8
#undef VECS
#define VECS 2
#endif
#define SCALED (BITS < 16)
#define GROUPS (SCALED && GROUP == 32 ? 2 : 1)              // scale groups in a step of 64 inputs
#define WORDS (GROUPS * (ASYM ? 2 : 1))                     // of a lane for a step and tile: scales, then shifts
#define PITCH (NT * 8 + 1)
#define RESIDENT (NT == 1 ? (WARPS < 24 ? 24 / WARPS : 1) : NT == 2 ? (WARPS < 16 ? 16 / WARPS : 1) : 1)  // blocks that registers are for

// y = x W^T, NORM: of x * norm_weight with 1 / rms(x) applied at the end; GATED: a tile's first 8 outputs are gates of
// its last 8; RESIDUAL: added; TOP1: only the largest score of each row and where it is, one for each block and row.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_linear(
    const Quad* __restrict__ weight, const u32* __restrict__ scales, const u16* __restrict__ x_all,
    const u16* __restrict__ norm_weight, const u16* __restrict__ residual, u16* __restrict__ y,
    float* __restrict__ best_score, i64* __restrict__ best_id, const Quad* __restrict__ tail, float eps, int M_all, int N,
    int K, int tail_N, int x_stride, int residual_stride, int y_stride) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int steps = K / 64, tiles = (N + 15) / 16, groups = (tiles + R - 1) / R;
  const int first_row = blockIdx.y * NT * 8, M = M_all - first_row < NT * 8 ? M_all - first_row : NT * 8;
  const u16* x = x_all + (i64)first_row * x_stride;
  const int k_begin = steps * warp / WARPS, k_end = steps * (warp + 1) / WARPS;

  Quad* ring = shared_memory + warp * STAGES * R * VECS * 32;
  u32* ring_scales = (u32*)(shared_memory + WARPS * STAGES * R * VECS * 32) + warp * STAGES * R * WORDS * 32;
  float* sums = (float*)(shared_memory + WARPS * STAGES * R * VECS * 32) + (SCALED ? THREADS * STAGES * R * WORDS : 0);
  float* squares = sums + WARPS * R * 16 * PITCH;  // [WARPS][NT * 8], then 1 / rms in the first row
  float* top_score = squares + WARPS * NT * 8;     // [NT * 8]
  int* top_id = (int*)(top_score + NT * 8);

#if TAIL  // the first blocks; their steps of 64 inputs are four slots, one for each j
  const int tail_tiles = (tail_N + 15) / 16, tail_groups = (tail_tiles + R - 1) / R;
  const bool in_tail = (int)blockIdx.x < tail_groups;
  const int first_group = in_tail ? blockIdx.x : blockIdx.x - tail_groups, group_stride = gridDim.x - tail_groups;
#else
  constexpr bool in_tail = false;
  const int first_group = blockIdx.x, group_stride = gridDim.x;
#endif

  int asked_group = first_group, asked_k = in_tail ? k_begin * 4 : k_begin, slot = 0;
  auto ask = [&](int into) {
#if TAIL
    if (in_tail) {
      if (asked_k < k_end * 4) {
#pragma unroll
        for (int r = 0; r < R; r++) {
          const int tile = first_group * R + r < tail_tiles ? first_group * R + r : tail_tiles - 1;
          copy_async<16>(ring + (into * R + r) * VECS * 32 + lane, tail + ((i64)tile * steps * 4 + asked_k) * 32 + lane);
        }
        asked_k++;
      }
      commit_copies();
      return;
    }
#endif
    if (k_begin < k_end && asked_group < groups) {
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int tile = asked_group * R + r < tiles ? asked_group * R + r : tiles - 1;
        const Quad* from = weight + ((i64)tile * steps + asked_k) * (VECS * 32) + lane;
#pragma unroll
        for (int v = 0; v < VECS; v++) copy_async<16>(ring + ((into * R + r) * VECS + v) * 32 + lane, from + v * 32);
#if SCALED
        const int scale_step = GROUP > 64 ? asked_k * 64 / GROUP : asked_k, scale_steps = K / (GROUP > 64 ? GROUP : 64);
        copy_async<WORDS * 4>(ring_scales + ((into * R + r) * 32 + lane) * WORDS,
                              scales + (((i64)tile * scale_steps + scale_step) * 8 + g) * WORDS);
#endif
      }
      if (++asked_k == k_end) asked_k = k_begin, asked_group += group_stride;
    }
    commit_copies();
  };

#pragma unroll
  for (int s = 0; s < STAGES; s++) ask(s);
  let_next_kernel_start();
  await_kernel_before();

  const u16* rows[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) rows[n] = x + (i64)(n * 8 + g < M ? n * 8 + g : M - 1) * x_stride + t * 8;
#if TOP1
  for (int i = threadIdx.x; i < NT * 8; i += THREADS) top_score[i] = -as_float(0x7F800000u), top_id[i] = 0;
#endif

  u32 ahead[NT][8], ahead_norm[8];
  auto look_ahead = [&](int k) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const Quad q = load_quad(rows[n] + k * 64 + h * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) ahead[n][h * 4 + i] = q.v[i];
      }
#if NORM
      const Quad q = load_quad(norm_weight + k * 64 + h * 32 + t * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) ahead_norm[h * 4 + i] = q.v[i];
#endif
    }
  };
  if (k_begin < k_end) look_ahead(k_begin);

  for (int group = first_group; in_tail || group < groups; group += group_stride) {
    float acc[R][NT][4] = {};
#if NORM
    float gram[NT][4] = {};
    const bool measure = group == first_group;
#endif
    for (int k = k_begin; k < k_end; k++) {
      u32 b[NT][8];
#if NORM
      if (measure) {  // x x^T by the tensor core: its diagonal has the sums of squares
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int n = 0; n < NT; n++) {
            const int even = n & ~1, odd = n | 1;
            mma(gram[n], ahead[even][j * 2], odd < NT ? ahead[odd % NT][j * 2] : 0, ahead[even][j * 2 + 1],
                odd < NT ? ahead[odd % NT][j * 2 + 1] : 0, ahead[n][j * 2], ahead[n][j * 2 + 1]);
          }
      }
#endif
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) b[n][i] = NORM ? fma2(ahead[n][i], ahead_norm[i], 0x80008000u) : ahead[n][i];
      look_ahead(k + 1 < k_end ? k + 1 : k_begin);
#if TAIL
      if (in_tail) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          await_copies<STAGES - 1>();
#pragma unroll
          for (int r = 0; r < R; r++) {
            const Quad a = ring[(slot * R + r) * VECS * 32 + lane];
#pragma unroll
            for (int n = 0; n < NT; n++) mma(acc[r][n], a.v[0], a.v[1], a.v[2], a.v[3], b[n][j * 2], b[n][j * 2 + 1]);
          }
          ask(slot);
          slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        continue;
      }
#endif
      await_copies<STAGES - 1>();
#pragma unroll
      for (int r = 0; r < R; r++) {
        const Quad* mine = ring + ((slot * R + r) * VECS) * 32 + lane;
#if SCALED
        const u32* s = ring_scales + ((slot * R + r) * 32 + lane) * WORDS;
        Quad q[VECS];
#pragma unroll
        for (int v = 0; v < VECS; v++) q[v] = mine[v * 32];
#pragma unroll
        for (int part = 0; part < GROUPS; part++) {
          float p[NT][4] = {};
          u32 shift0 = 0xC308C308u, shift1 = 0xC308C308u;  // -136
#if ASYM
          shift0 = both(s[GROUPS + part] & 0xFFFFu), shift1 = both(s[GROUPS + part] >> 16);
#endif
#pragma unroll
          for (int j = part * (4 / GROUPS); j < (part + 1) * (4 / GROUPS); j++) {
            u32 a[4];
#if BITS == 4
#pragma unroll
            for (int i = 0; i < 4; i++)
              a[i] = fma2(nibbles(q[0].v[j] >> (4 * i)), 0x3F803F80u, i & 1 ? shift1 : shift0);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(p[n], a[0], a[1], a[2], a[3], b[n][j * 2], b[n][j * 2 + 1]);
#else  // q = 16 h + l: two products into the same sums, 16 (128 + h + 8) - 2176 and (128 + l) - 128
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = fma2(nibbles(q[0].v[j] >> (4 * i)), 0x41804180u, 0xC508C508u);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(p[n], a[0], a[1], a[2], a[3], b[n][j * 2], b[n][j * 2 + 1]);
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = fma2(nibbles(q[VECS - 1].v[j] >> (4 * i)), 0x3F803F80u, 0xC300C300u);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(p[n], a[0], a[1], a[2], a[3], b[n][j * 2], b[n][j * 2 + 1]);
#endif
          }
          const float s0 = low(s[part]), s1 = high(s[part]);
#pragma unroll
          for (int n = 0; n < NT; n++) {
            acc[r][n][0] += p[n][0] * s0, acc[r][n][1] += p[n][1] * s0;
            acc[r][n][2] += p[n][2] * s1, acc[r][n][3] += p[n][3] * s1;
          }
        }
#else
#pragma unroll
        for (int j = 0; j < 4; j++) {
          Quad a = mine[j * 32];
#pragma unroll
          for (int n = 0; n < NT; n++) mma(acc[r][n], a.v[0], a.v[1], a.v[2], a.v[3], b[n][j * 2], b[n][j * 2 + 1]);
        }
#endif
      }
      ask(slot);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }

    float* own = sums + warp * R * 16 * PITCH;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) own[(r * 16 + g + (i >> 1) * 8) * PITCH + n * 8 + t * 2 + (i & 1)] = acc[r][n][i];
#if NORM
    if (measure) {
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if ((i >> 1) == (n & 1) && g == t * 2 + (i & 1)) squares[warp * NT * 8 + n * 8 + g] = gram[n][i];
    }
#endif
    __syncthreads();
#if NORM
    if (measure) {
      float sum = 0;
      if (threadIdx.x < NT * 8)
        for (int w = 0; w < WARPS; w++) sum += squares[w * NT * 8 + threadIdx.x];
      __syncthreads();
      if (threadIdx.x < NT * 8) squares[threadIdx.x] = rsqrtf(sum / K + eps);
      __syncthreads();
    }
#endif
    auto total = [&](int output, int row) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += sums[(w * R * 16 + output) * PITCH + row];
#if NORM
      sum *= squares[row];
#endif
      return sum;
    };
#if TOP1
    for (int row = warp; row < M; row += WARPS) {
      float score = -as_float(0x7F800000u);
      int id = 0x7FFFFFFF;
      for (int output = lane; output < R * 16; output += 32)
        if (group * R * 16 + output < N) {
          const float sum = total(output, row);
          if (sum > score) score = sum, id = group * R * 16 + output;
        }
      for (int half = 16; half; half >>= 1) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, score, half);
        const int other_id = __shfl_xor_sync(0xFFFFFFFFu, id, half);
        if (other > score || (other == score && other_id < id)) score = other, id = other_id;
      }
      if (lane == 0 && score > top_score[row]) top_score[row] = score, top_id[row] = id;  // ids grow from group to group
    }
#else
#if GATED
#define OUTPUTS (R * 8)
#else
#define OUTPUTS (R * 16)
#endif
    for (int i = threadIdx.x; i < M * OUTPUTS / 2; i += THREADS) {
      const int row = i / (OUTPUTS / 2), pair = i % (OUTPUTS / 2) * 2;
#if TAIL
      const i64 column = (i64)group * OUTPUTS + pair + (in_tail ? N : 0);
      if (column >= (in_tail ? N + tail_N : N)) continue;
#else
      const i64 column = (i64)group * OUTPUTS + pair;
      if (column >= (GATED ? N / 2 : N)) continue;
#endif
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
#if GATED
        const int gate = (pair >> 3) * 16 + (pair & 7) + e;
        const float z = total(gate, row);
        value[e] = z / (1.0f + expf(-z)) * total(gate + 8, row);
#else
        value[e] = total(pair + e, row);
#endif
      }
#if RESIDUAL
      const u32 old = load_word(residual + (i64)(first_row + row) * residual_stride + column);
      value[0] += low(old), value[1] += high(old);
#endif
      *(u32*)(y + (i64)(first_row + row) * y_stride + column) = to_bf16x2(value[0], value[1]);
    }
#endif
    if (in_tail) break;
    __syncthreads();
  }
  await_copies<0>();
#if TOP1
  for (int row = threadIdx.x; row < M; row += THREADS) {
    const i64 at = (i64)(first_row + row) * gridDim.x + blockIdx.x;
    best_score[at] = top_score[row], best_id[at] = top_id[row];
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

// w [N, K] in bf16 from the packed weight, each number rounded once; a warp for each tile and step. GATED: the rows go
// back to where they came from, gates first.
extern "C" __global__ void __launch_bounds__(256) unpack(const Quad* __restrict__ weight, const u32* __restrict__ scales,
                                                          u16* __restrict__ dense, int N, int K) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, steps = K / 64, tiles = (N + 15) / 16;
  const i64 at = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);
  if (at >= (i64)tiles * steps) return;
  const int tile = (int)(at / steps), k = (int)(at % steps);
  Quad q[VECS];
  for (int v = 0; v < VECS; v++) q[v] = weight[(at * VECS + v) * 32 + lane];
  for (int half = 0; half < 2; half++) {
    int row = tile * 16 + g + half * 8;
    if (row >= N) continue;
#if GATED
    row = tile * 8 + g + half * (N / 2);
#endif
    for (int part = 0; part < 2; part++) {
      Quad out;
#if SCALED
      const int scale_step = GROUP > 64 ? k * 64 / GROUP : k, scale_steps = K / (GROUP > 64 ? GROUP : 64);
      const u32* s = scales + (((i64)tile * scale_steps + scale_step) * 8 + g) * WORDS;
      const u32 pair = s[part * (GROUPS - 1)];
      const float scale = half ? high(pair) : low(pair);
      float zero = 0;
#if ASYM
      const u32 shifts = s[GROUPS + part * (GROUPS - 1)];
      zero = -136.0f - (half ? high(shifts) : low(shifts));
#endif
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
      for (int i = 0; i < 4; i++) out.v[i] = to_bf16x2(value[2 * i], value[2 * i + 1]);
#else
      for (int i = 0; i < 4; i++) out.v[i] = q[(part * 2 + (i >> 1)) % VECS].v[half + 2 * (i & 1)];
#endif
      *(Quad*)(dense + (i64)row * K + k * 64 + part * 32 + t * 8) = out;
    }
  }
}
