// Every word of the page, in its languages. {name} is filled in.
import { look } from "/page/storage.js";

const EN = {
  skip: "Skip to the message", newChat: "New chat", chat: "Chat", dashboard: "Dashboard", conversations: "Conversations",
  noConversations: "Conversations are stored in this browser only.", untitled: "New conversation",
  remove: "Delete", removed: "Deleted", undo: "Undo", menu: "Menu", model: "Model", help: "Keyboard", settings: "Settings",
  key: "API key", themeAuto: "Auto", themeLight: "Light", themeDark: "Dark", theme: "Colours", language: "Language", thisLanguage: "English",
  search: "Search", notFound: "No conversation contains these words.", more: "More for “{title}”", rename: "Rename",
  exportMarkdown: "Export as Markdown", exportJson: "Export as JSON", importFile: "Import a conversation (JSON)",
  notConversation: "{name} is not a conversation that this page or headrace chat saved as JSON.",
  systemLeft: "Imported without its system prompt, which is a setting here: {system}", answering: "Answering",
  unknownAddress: "This browser has no conversation at this address.",
  emptyTitle: "What would you like to ask?", emptyText: "{model} answers on this server. Nothing leaves it.",
  emptyTextNoModel: "The model answers on this server. Nothing leaves it.",
  room: "Its context holds {n} tokens.",
  ideas: ["Explain how a water wheel works, for a child", "Write a Python function that merges two sorted lists",
    "Give me three names for a small bakery", "What is the difference between TCP and UDP? Use a table"],
  attach: "Add text files", fileLarge: "{file} is {size}; the model’s context holds at most {most}.", fileEmpty: "{file} is empty.",
  fileNoText: "{file} is not text: only UTF-8 text can be added, no pictures or documents.", fileUnread: "{file} cannot be read: add files, not folders.",
  listen: "Transcribe a sound file", record: "Record speech", recordEnd: "End the recording", transcribing: "Transcribing … (click to stop)",
  noMicrophone: "The browser gives no microphone: allow it for this page.", noSpeech: "No speech was found.", notHeard: "Not transcribed: {reason}",
  prompt: "Message", send: "Send", stop: "Stop", latest: "To the latest",
  hint: "Enter sends · Shift+Enter adds a line · Esc stops",
  you: "You", answer: "Answer", copy: "Copy", copied: "Copied", again: "Answer again", againWord: "Again", edit: "Edit", save: "Send", cancel: "Cancel",
  tokens: "Tokens", tokensHint: "Probability and alternatives of every token",
  unlikely: "unlikely", likely: "likely",
  thinking: "Thinking …", thought: "Thoughts",
  queueRuns: "Sent when the answer ends", queueHeld: "Not sent yet", sendQueued: "Send", unqueue: "Remove", waiting: "Waiting for the first token", code: "code",
  ttft: "first token {value}", speed: "{value} tokens/s", counted: "{n} tokens", one: "1 token", by: "answered by {model}", promptCached: "{n} in the prompt, {cached} of them cached",
  promptTokens: "{n} in the prompt", length: "cut at the token limit", stopped: "stopped", broken: "interrupted",
  goOn: "Go on", goOnHint: "Continue this answer where it ended", editPrompt: "Edit", tryAgain: "Try again", tryIn: "Try again ({s} s)",
  errorKey: "The server needs an API key", errorBusy: "The server is busy", errorDown: "The engine is not ready",
  errorUnreachable: "The server cannot be reached", errorUnreachableText: "Is it still running? The page keeps trying.",
  errorLongText: "The conversation and the answer need {asked} tokens, and the model’s context holds {most}. Shorten the message, or lower “Longest answer”.",
  errorBusyText: "Too many requests are waiting, or the quota of this key is used up.", errorDownText: "It is loading or restarting. The page keeps trying.", errorKeyText: "Enter the key of the server.",
  earlierVersion: "Earlier answer", laterVersion: "Later answer",
  errorLong: "This is too long for the model", errorRefused: "The server refused this", errorFailed: "Something went wrong on the server",
  keyTitle: "API key", keyText: "This server was started with a key. It is sent with every request, to this server only.",
  keyWrong: "This key is wrong. Check for spaces and missing characters.", keyKeep: "Keep it in this browser", keyUse: "Use",
  close: "Close", full: "The browser's storage is full, so this conversation is not stored. Delete older ones.",
  system: "System prompt", systemHint: "How the model should behave",
  temperature: "Temperature", temperatureHint: "0 always takes the most probable token",
  top_p: "Top-p", top_pHint: "Keep the most probable tokens up to this share", top_k: "Top-k", top_kHint: "Keep the K most probable tokens",
  min_p: "Min-p", min_pHint: "At least this share of the highest probability",
  repetition_penalty: "Repetition penalty", repetition_penaltyHint: "Above 1 avoids words already used",
  max_tokens: "Longest answer", max_tokensHint: "Tokens", seed: "Seed", seedHint: "The same seed gives the same answer",
  stopAt: "Stop at", stopAtHint: "One text per line", own: "model’s own", inForce: "{value} · {origin}", rangeBoth: "{min} to {max}", rangeLeast: "{min} or more", seedRange: "A whole number of at most 15 digits",
  origin_model: "model", origin_catalog: "catalog", origin_family: "family", origin_default: "default", origin_name: "name", origin_neutral: "neutral", none: "none", reset: "Reset",
  askTokens: "Record tokens", askTokensHint: "Probabilities and alternatives of every token, under “Tokens”",
  noTokens: "The tokens are not available.", among: "not among the best {n}",
  exit_threshold: "Early exit", exit_thresholdHint: "Confidence at which the layers above an exit are skipped",
  cascade_threshold: "Smaller model", cascade_thresholdHint: "Confidence at which its token is accepted; otherwise the large model generates",
  bySmaller: "by the smaller model", bySmallerSure: "by the smaller model, confidence {sure} %", turns: "{early} % of the tokens",
  byItself: "by the model itself", byItselfSure: "by the model itself, confidence of the smaller one {sure} %",
  left: "early exit", exits: "{mean} of {deepest} layers on average, {early} % early exits", layers: "after {n} layers", layersSure: "after {n} layers, confidence {sure} %",
  modelLoads: "{model} loads, {n} %", model_unloaded: "not in memory", model_loading: "loading",
  unknown: "…", loading: "loading", ready: "ready", draining: "shutting down", dead: "restarting", stuck: "restarting", failing: "restarting", closed: "stopped",
  unreachable: "unreachable", locked: "key needed",
  throughput: "Throughput", generated: "generated", prompted: "prompts", queue: "Requests", running: "running", queued: "waiting",
  kv: "KV cache", used: "in use", prefixes: "Prompts found in the prefix cache", hits: "hits", firstToken: "Time to first token", between: "Time between tokens",
  tileSpeed: "tokens/s", tileRunning: "running", tileQueued: "waiting", tileKv: "KV cache in use", tileHits: "prefix cache hits",
  tileDone: "requests done", tileRestarts: "engine restarts", noData: "No requests in this time",
  plotNote: "The last five minutes in which this tab was open. Percentiles cover the last 30 seconds and are estimates from histograms.",
  ago: "{s} s ago", now: "now", minutes: "{m} min",
  keys: [["Enter", "send"], ["Shift+Enter", "new line"], ["Esc", "stop the answer"], ["↑", "edit the last message (when empty)"],
    ["/", "to the message"], ["Alt+A", "add text files"], ["Alt+N", "new chat"], ["Alt+S", "settings"], ["Alt+D", "chat or dashboard"],
    ["Alt+R", "answer again"], ["← →", "through the tokens"], ["?", "this list"]],
};

const ZH = {
  skip: "跳到输入框", newChat: "新对话", chat: "对话", dashboard: "仪表盘", conversations: "历史对话",
  noConversations: "对话只保存在这个浏览器里。", untitled: "新对话",
  remove: "删除", removed: "已删除", undo: "撤销", menu: "菜单", model: "模型", help: "键盘操作", settings: "设置",
  key: "API 密钥", themeAuto: "自动", themeLight: "浅色", themeDark: "深色", theme: "颜色", language: "语言", thisLanguage: "中文",
  search: "搜索", notFound: "没有对话包含这些文字。", more: "“{title}”的更多操作", rename: "重命名",
  exportMarkdown: "导出为 Markdown", exportJson: "导出为 JSON", importFile: "导入对话（JSON）",
  notConversation: "{name} 不是本页面或 headrace chat 保存的 JSON 对话。",
  systemLeft: "已导入，但不含系统提示（在这里它是一项设置）：{system}", answering: "正在回答",
  unknownAddress: "这个浏览器里没有这个地址的对话。",
  emptyTitle: "想问点什么？", emptyText: "{model} 就在这台服务器上回答，内容不会发往别处。",
  emptyTextNoModel: "模型就在这台服务器上回答，内容不会发往别处。",
  room: "上下文可容纳 {n} 个词元。",
  ideas: ["给小朋友讲讲水车是怎么转的", "用 Python 写一个合并两个有序列表的函数", "给一家小面包店起三个名字", "用表格说明 TCP 和 UDP 的区别"],
  attach: "添加文本文件", fileLarge: "{file} 有 {size}，模型上下文最多容纳 {most}。", fileEmpty: "{file} 是空文件。",
  fileNoText: "{file} 不是文本：只能添加 UTF-8 文本，不能添加图片或文档。", fileUnread: "无法读取 {file}：请添加文件，而不是文件夹。",
  listen: "转写声音文件", record: "录音", recordEnd: "结束录音", transcribing: "正在转写…（点击停止）",
  noMicrophone: "浏览器没有提供麦克风：请允许本页面使用。", noSpeech: "没有听到语音。", notHeard: "没有转写：{reason}",
  prompt: "输入消息", send: "发送", stop: "停止", latest: "到最新处",
  hint: "Enter 发送 · Shift+Enter 换行 · Esc 停止",
  you: "你", answer: "回答", copy: "复制", copied: "已复制", again: "重新回答", againWord: "重答", edit: "编辑", save: "发送", cancel: "取消",
  tokens: "词元", tokensHint: "每个词元的概率和候选",
  unlikely: "不太可能", likely: "很可能",
  thinking: "思考中…", thought: "思考过程",
  queueRuns: "回答结束后发送", queueHeld: "尚未发送", sendQueued: "发送", unqueue: "移除", waiting: "正在等待第一个词元", code: "代码",
  ttft: "首词元 {value}", speed: "{value} 词元/秒", counted: "{n} 个词元", one: "1 个词元", by: "由 {model} 回答", promptCached: "提示 {n} 个，其中 {cached} 个命中缓存",
  promptTokens: "提示 {n} 个", length: "达到长度上限", stopped: "已停止", broken: "中断",
  goOn: "继续", goOnHint: "从中断处继续这个回答", editPrompt: "编辑", tryAgain: "重试", tryIn: "重试（{s} 秒）",
  errorKey: "服务器需要 API 密钥", errorBusy: "服务器正忙", errorDown: "引擎尚未就绪",
  errorUnreachable: "连不上服务器", errorUnreachableText: "它还在运行吗？页面会继续尝试连接。",
  errorLongText: "对话和回答共需 {asked} 个词元，而模型的上下文最多容纳 {most} 个。请缩短消息，或调小“最长回答”。",
  errorBusyText: "排队的请求太多，或者这个密钥的配额已用完。", errorDownText: "它正在加载或重启，页面会继续尝试连接。", errorKeyText: "请输入启动服务器时设置的密钥。",
  earlierVersion: "上一个回答", laterVersion: "下一个回答",
  errorLong: "超出了模型的长度", errorRefused: "服务器拒绝了这个请求", errorFailed: "服务器出错了",
  keyTitle: "API 密钥", keyText: "这台服务器启动时设了密钥。密钥随每个请求只发送给这台服务器。",
  keyWrong: "密钥不对，请检查空格或漏掉的字符。", keyKeep: "保存在这个浏览器里", keyUse: "使用",
  close: "关闭", full: "浏览器存储空间已满，这个对话没有保存。请删除一些旧对话。",
  system: "系统提示", systemHint: "希望模型怎样回答",
  temperature: "温度", temperatureHint: "0 表示总取最可能的词元",
  top_p: "Top-p", top_pHint: "只取概率最高、累计达到此值的词元", top_k: "Top-k", top_kHint: "只取最可能的若干个",
  min_p: "Min-p", min_pHint: "至少为最高概率的这个比例",
  repetition_penalty: "重复惩罚", repetition_penaltyHint: "大于 1 时避免重复用词",
  max_tokens: "最长回答", max_tokensHint: "词元数", seed: "种子", seedHint: "种子相同，回答相同",
  stopAt: "停止文本", stopAtHint: "每行一个", own: "模型自带", inForce: "{value} · {origin}", rangeBoth: "{min} 到 {max}", rangeLeast: "不小于 {min}", seedRange: "最多 15 位的整数",
  origin_model: "模型", origin_catalog: "目录", origin_family: "系列", origin_default: "默认", origin_name: "名称", origin_neutral: "无作用", none: "无", reset: "恢复默认",
  askTokens: "记录词元", askTokensHint: "每个词元的概率和候选，在“词元”里查看",
  noTokens: "无法取得词元。", among: "不在前 {n} 名",
  exit_threshold: "早退", exit_thresholdHint: "出口的置信度达到此值时，不再计算其上的层",
  cascade_threshold: "级联：由小模型写", cascade_thresholdHint: "小模型的置信度达到此值时由它写；否则由模型读完未读部分再写",
  bySmaller: "由小模型写出", bySmallerSure: "由小模型写出，置信度 {sure} %", turns: "占词元的 {early} %",
  byItself: "由模型自己写出", byItselfSure: "由模型自己写出，小模型的置信度 {sure} %",
  left: "早退", exits: "平均 {mean} / {deepest} 层，{early} % 早退", layers: "第 {n} 层之后", layersSure: "第 {n} 层之后，出口的置信度 {sure} %",
  modelLoads: "正在加载 {model}，{n} %", model_unloaded: "未加载", model_loading: "加载中",
  unknown: "…", loading: "加载中", ready: "就绪", draining: "正在关闭", dead: "正在重启", stuck: "正在重启", failing: "正在重启", closed: "已停止",
  unreachable: "连不上", locked: "需要密钥",
  throughput: "吞吐量", generated: "生成", prompted: "提示", queue: "请求", running: "运行中", queued: "排队中",
  kv: "KV 缓存", used: "已用", prefixes: "提示命中前缀缓存", hits: "命中", firstToken: "首词元延迟", between: "词元间延迟",
  tileSpeed: "词元/秒", tileRunning: "运行中", tileQueued: "排队中", tileKv: "KV 缓存已用", tileHits: "前缀缓存命中",
  tileDone: "完成的请求", tileRestarts: "引擎重启", noData: "这段时间没有请求",
  plotNote: "本标签页打开期间的最近五分钟。百分位数取自最近 30 秒的直方图，是估计值。",
  ago: "{s} 秒前", now: "现在", minutes: "{m} 分",
  keys: [["Enter", "发送"], ["Shift+Enter", "换行"], ["Esc", "停止回答"], ["↑", "编辑上一条消息（输入框为空时）"],
    ["/", "到输入框"], ["Alt+A", "添加文本文件"], ["Alt+N", "新对话"], ["Alt+S", "设置"], ["Alt+D", "对话或仪表盘"],
    ["Alt+R", "重新回答"], ["← →", "在词元间移动"], ["?", "本列表"]],
};

const ALL = { en: EN, zh: ZH };

export function language() {
  return look.language ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
}

/** A text in the page's language. */
export function t(name, values = {}) {
  const text = ALL[language()][name];
  return typeof text === "string" ? text.replace(/\{(\w+)\}/g, (_, key) => values[key]) : text;
}

/** Whether there is such a text. */
export const has = (name) => name in EN;

/** A number as the language writes it. */
export const number = (value, digits = 0) =>
  new Intl.NumberFormat(language(), { maximumFractionDigits: digits, minimumFractionDigits: digits }).format(value);

/** Seconds in a unit that reads well. */
export function seconds(value) {
  if (value === null || Number.isNaN(value)) return "–";
  return value < 1 ? `${number(value * 1000, value < 0.01 ? 1 : 0)} ms` : `${number(value, value < 10 ? 2 : 1)} s`;
}

/** Fill in every element that names its text. */
export function translate(root = document) {
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  for (const node of root.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of root.querySelectorAll("[data-placeholder]")) node.placeholder = t(node.dataset.placeholder);
  for (const node of root.querySelectorAll("[data-label]")) {
    node.setAttribute("aria-label", t(node.dataset.label));
    if (node.tagName === "BUTTON") node.title = t(node.dataset.label);
  }
}
