// Element by element and row by row: copies, conversions, bias, SwiGLU.

// out[i] = table[ids[i]]; an id outside of the table gives NaN, which the checks for non-finite values find.
template <int N>
__device__ void gather(const bf16* src, i64 src_stride, i64 src_rows, const u32* ids, bf16* dst, i64 dst_stride,
                       i64 rows, i64 cols) {
    FOR_EACH(N) {
        i64 from = ids ? ids[row] : row;
        float v[N];
        if (from < src_rows) {
            load(src + from * src_stride + col, v);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = __int_as_float(0x7fc00000);
        }
        store(dst + row * dst_stride + col, v);
    }
}

// dst[ids[i]] = src[i]
template <int N>
__device__ void scatter(const bf16* src, i64 src_stride, const u32* ids, bf16* dst, i64 dst_stride, i64 dst_rows,
                        i64 rows, i64 cols) {
    FOR_EACH(N) {
        i64 to = ids[row];
        float v[N];
        load(src + row * src_stride + col, v);
        if (to < dst_rows) store(dst + to * dst_stride + col, v);
    }
}

template <int N, typename From, typename To>
__device__ void convert(const From* src, i64 src_stride, To* dst, i64 dst_stride, i64 rows, i64 cols) {
    FOR_EACH(N) {
        float v[N];
        load(src + row * src_stride + col, v);
        store(dst + row * dst_stride + col, v);
    }
}

template <int N>
__device__ void add_bias(const float* bias, bf16* y, i64 stride, i64 rows, i64 cols) {
    float b[N];
    FOR_EACH(N) {
        float v[N];
        load(bias + col, b);
        load(y + row * stride + col, v);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += b[i];
        store(y + row * stride + col, v);
    }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// `cols` is that of y: half of gate_up's.
template <int N>
__device__ void swiglu(const bf16* gate_up, i64 in_stride, bf16* y, i64 out_stride, i64 rows, i64 cols) {
    FOR_EACH(N) {
        float gate[N], up[N];
        const bf16* in = gate_up + row * in_stride + col;
        load(in, gate);
        load(in + cols, up);
#pragma unroll
        for (int i = 0; i < N; ++i) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
        store(y + row * out_stride + col, gate);
    }
}

template <int N>
__device__ void swiglu_backward(const bf16* dy, i64 dy_stride, const bf16* gate_up, i64 in_stride,
                                bf16* d_gate_up, i64 out_stride, i64 rows, i64 cols) {
    FOR_EACH(N) {
        float d[N], gate[N], up[N];
        const bf16* in = gate_up + row * in_stride + col;
        bf16* out = d_gate_up + row * out_stride + col;
        load(dy + row * dy_stride + col, d);
        load(in, gate);
        load(in + cols, up);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float s = sigmoid(gate[i]), silu = gate[i] * s;
            float d_gate = d[i] * up[i] * (s + silu * (1.f - s));
            up[i] = d[i] * silu;
            gate[i] = d_gate;
        }
        store(out, gate);
        store(out + cols, up);
    }
}

BOTH(gather,
     (const bf16* src, i64 src_stride, i64 src_rows, const u32* ids, bf16* dst, i64 dst_stride, i64 rows, i64 cols),
     (src, src_stride, src_rows, ids, dst, dst_stride, rows, cols))
BOTH(scatter,
     (const bf16* src, i64 src_stride, const u32* ids, bf16* dst, i64 dst_stride, i64 dst_rows, i64 rows, i64 cols),
     (src, src_stride, ids, dst, dst_stride, dst_rows, rows, cols))
BOTH(add_bias, (const float* bias, bf16* y, i64 stride, i64 rows, i64 cols), (bias, y, stride, rows, cols))
BOTH(swiglu, (const bf16* gate_up, i64 in_stride, bf16* y, i64 out_stride, i64 rows, i64 cols),
     (gate_up, in_stride, y, out_stride, rows, cols))
BOTH(swiglu_backward,
     (const bf16* dy, i64 dy_stride, const bf16* gate_up, i64 in_stride, bf16* d_gate_up, i64 out_stride, i64 rows,
      i64 cols),
     (dy, dy_stride, gate_up, in_stride, d_gate_up, out_stride, rows, cols))

#define CONVERT(name, From, To)                                                                                  \
    extern "C" __global__ void name##_8(const From* src, i64 src_stride, To* dst, i64 dst_stride, i64 rows,      \
                                        i64 cols) {                                                              \
        convert<8>(src, src_stride, dst, dst_stride, rows, cols);                                                \
    }                                                                                                            \
    extern "C" __global__ void name##_1(const From* src, i64 src_stride, To* dst, i64 dst_stride, i64 rows,      \
                                        i64 cols) {                                                              \
        convert<1>(src, src_stride, dst, dst_stride, rows, cols);                                                \
    }

CONVERT(round_to_bf16, float, bf16)
CONVERT(widen, bf16, float)

// flag = 1 where an element is NaN or infinite.
template <int N>
__device__ void find_non_finite(const bf16* x, i64 stride, i64 rows, i64 cols, u32* flag) {
    FOR_EACH(N) {
        float v[N];
        load(x + row * stride + col, v);
        bool found = false;
#pragma unroll
        for (int i = 0; i < N; ++i) found |= !(fabsf(v[i]) < INFINITE);
        if (found) *flag = 1;
    }
}
BOTH(find_non_finite, (const bf16* x, i64 stride, i64 rows, i64 cols, u32* flag), (x, stride, rows, cols, flag))
