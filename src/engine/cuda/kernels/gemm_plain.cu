// c[m, n] (+)= sum over k of b(m, k) a(n, k), any strides: the fallback where the library has no algorithm.

#define TILE 16

extern "C" __global__ void gemm_plain(const bf16* a, i64 a_col, i64 a_sum, const bf16* b, i64 b_row, i64 b_sum,
                                      void* c, i64 c_stride, i64 m, i64 n, i64 k, u32 is_float, u32 accumulate) {
    __shared__ float a_tile[TILE][TILE + 1], b_tile[TILE][TILE + 1];
    int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    i64 col0 = (i64)blockIdx.x * TILE, row0 = (i64)blockIdx.y * TILE;
    float sum = 0.f;
    for (i64 k0 = 0; k0 < k; k0 += TILE) {
        // Thread (x, y) fetches summed index x of column y of A, and of row y of B.
        bool inside = k0 + x < k;
        a_tile[y][x] = inside && col0 + y < n ? to_float(a[(col0 + y) * a_col + (k0 + x) * a_sum]) : 0.f;
        b_tile[y][x] = inside && row0 + y < m ? to_float(b[(row0 + y) * b_row + (k0 + x) * b_sum]) : 0.f;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILE; ++i) sum += a_tile[x][i] * b_tile[y][i];
        __syncthreads();
    }
    i64 row = row0 + y, col = col0 + x;
    if (row >= m || col >= n) return;
    i64 at = row * c_stride + col;
    if (is_float) {
        float* p = (float*)c + at;
        *p = accumulate ? *p + sum : sum;
    } else {
        bf16* p = (bf16*)c + at;
        *p = to_bf16(accumulate ? to_float(*p) + sum : sum);
    }
}
