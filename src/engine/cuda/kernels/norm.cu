// RMSNorm over whole rows, with the residual addition before it, and its backward. One thread block per row;
// a thread holds up to ITEMS groups of N columns, so that a row is read once.

template <int N>
struct Groups {
    static const int ITEMS = N == 8 ? 4 : 16;
};

template <int N>
__device__ void norm(bf16* h, i64 h_stride, const bf16* delta, i64 delta_stride, const float* w, float eps, bf16* y,
                     i64 y_stride, i64 cols) {
    const int ITEMS = Groups<N>::ITEMS;
    __shared__ float space[33];
    i64 row = blockIdx.x;
    float v[ITEMS][N], squares = 0.f;
#pragma unroll
    for (int it = 0; it < ITEMS; ++it) {
        i64 col = ((i64)it * blockDim.x + threadIdx.x) * N;
        if (col >= cols) continue;
        load(h + row * h_stride + col, v[it]);
        if (delta) {
            float d[N];
            load(delta + row * delta_stride + col, d);
            // The sum is kept rounded, as the residual stream is, so that backward sees what was normalised.
#pragma unroll
            for (int i = 0; i < N; ++i) v[it][i] = to_float(to_bf16(v[it][i] + d[i]));
            store(h + row * h_stride + col, v[it]);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) squares += v[it][i] * v[it][i];
    }
    float r = rsqrtf(block_sum(squares, space) / cols + eps);
#pragma unroll
    for (int it = 0; it < ITEMS; ++it) {
        i64 col = ((i64)it * blockDim.x + threadIdx.x) * N;
        if (col >= cols) continue;
        float g[N];
        load(w + col, g);
#pragma unroll
        for (int i = 0; i < N; ++i) g[i] *= v[it][i] * r;
        store(y + row * y_stride + col, g);
    }
}

// partial[block][col] = sum over the block's rows of dy x r.
template <int N>
__device__ void norm_backward(const bf16* dy, i64 dy_stride, const bf16* x, i64 x_stride, const float* w, float eps,
                              bf16* dx, i64 dx_stride, float* partial, i64 rows, i64 cols) {
    const int ITEMS = Groups<N>::ITEMS;
    __shared__ float space[33];
    float dw[ITEMS][N];
#pragma unroll
    for (int it = 0; it < ITEMS; ++it)
#pragma unroll
        for (int i = 0; i < N; ++i) dw[it][i] = 0.f;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float v[ITEMS][N], d[ITEMS][N], squares = 0.f, product = 0.f;
#pragma unroll
        for (int it = 0; it < ITEMS; ++it) {
            i64 col = ((i64)it * blockDim.x + threadIdx.x) * N;
            if (col >= cols) continue;
            float g[N];
            load(x + row * x_stride + col, v[it]);
            load(dy + row * dy_stride + col, d[it]);
            load(w + col, g);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                squares += v[it][i] * v[it][i];
                product += d[it][i] * g[i] * v[it][i];
            }
        }
        float r = rsqrtf(block_sum(squares, space) / cols + eps);
        float mean = block_sum(product, space) / cols * r * r;
#pragma unroll
        for (int it = 0; it < ITEMS; ++it) {
            i64 col = ((i64)it * blockDim.x + threadIdx.x) * N;
            if (col >= cols) continue;
            float g[N], out[N];
            load(w + col, g);
            load(dx + row * dx_stride + col, out);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                out[i] += r * (d[it][i] * g[i] - v[it][i] * mean);
                dw[it][i] += d[it][i] * v[it][i] * r;
            }
            store(dx + row * dx_stride + col, out);
        }
    }
#pragma unroll
    for (int it = 0; it < ITEMS; ++it) {
        i64 col = ((i64)it * blockDim.x + threadIdx.x) * N;
        if (col >= cols) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) partial[blockIdx.x * cols + col + i] = dw[it][i];
    }
}

BOTH(norm,
     (bf16 * h, i64 h_stride, const bf16* delta, i64 delta_stride, const float* w, float eps, bf16* y, i64 y_stride,
      i64 cols),
     (h, h_stride, delta, delta_stride, w, eps, y, y_stride, cols))
BOTH(norm_backward,
     (const bf16* dy, i64 dy_stride, const bf16* x, i64 x_stride, const float* w, float eps, bf16* dx, i64 dx_stride,
      float* partial, i64 rows, i64 cols),
     (dy, dy_stride, x, x_stride, w, eps, dx, dx_stride, partial, rows, cols))

// out[col] += sum over parts of partial[part][col], in order. A block takes 32 columns; 8 warps share the parts.
extern "C" __global__ void add_partial(const float* partial, i64 parts, i64 cols, float* out) {
    __shared__ float sums[8][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 col = (i64)blockIdx.x * 32 + lane;
    float sum = 0.f;
    if (col < cols)
        for (i64 part = warp; part < parts; part += 8) sum += partial[part * cols + col];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && col < cols) {
        sum = sums[0][lane];
        for (int i = 1; i < 8; ++i) sum += sums[i][lane];
        out[col] += sum;
    }
}
