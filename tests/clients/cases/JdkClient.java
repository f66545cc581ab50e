// The HTTP client of the JDK with its default settings: over plain HTTP it asks to upgrade to HTTP/2 (h2c).

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;

public class JdkClient {
    static final String URL = System.getenv("CLIENTS_URL");
    static final String MODEL = System.getenv("CLIENTS_MODEL");
    static final String KEY = System.getenv("CLIENTS_KEY");
    static final String BODY =
            "{\"model\": \"%s\", \"max_tokens\": 20, \"stream\": %s, \"messages\": [{\"role\": \"user\", \"content\": \"Tell me.\"}]}";

    static void check(boolean condition, Object seen) {
        if (!condition) {
            throw new IllegalStateException("unexpected: " + seen);
        }
    }

    static HttpRequest.Builder request(String path, String key) {
        return HttpRequest.newBuilder(URI.create(URL + path)).header("authorization", "Bearer " + key);
    }

    static HttpRequest chat(String model, boolean stream, String key) {
        return request("/v1/chat/completions", key)
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(BODY.formatted(model, stream)))
                .build();
    }

    static String answer(HttpClient client, HttpRequest request, int status) throws Exception {
        HttpResponse<String> response = client.send(request, BodyHandlers.ofString());
        check(response.statusCode() == status, response.statusCode() + " " + response.body());
        return response.body();
    }

    public static void main(String[] arguments) {
        Map<String, Callable<Void>> cases = new LinkedHashMap<>();
        cases.put("models", () -> {
            String body = answer(HttpClient.newHttpClient(), request("/v1/models", KEY).build(), 200);
            check(body.contains(MODEL), body);
            return null;
        });
        cases.put("chat", () -> {
            // The first request of a client asks for the upgrade, the second uses its connection again.
            HttpClient client = HttpClient.newHttpClient();
            for (int count = 0; count < 2; count++) {
                String body = answer(client, chat(MODEL, false, KEY), 200);
                check(body.contains("\"content\""), body);
            }
            return null;
        });
        cases.put("stream", () -> {
            HttpClient client = HttpClient.newHttpClient();
            List<String> lines = client.send(chat(MODEL, true, KEY), BodyHandlers.ofLines()).body().toList();
            check(lines.stream().filter(line -> line.startsWith("data: {")).count() > 2, lines);
            check(lines.contains("data: [DONE]"), lines);
            return null;
        });
        cases.put("unknown model", () -> {
            String body = answer(HttpClient.newHttpClient(), chat("no-such-model", false, KEY), 404);
            check(body.contains("no-such-model"), body);
            return null;
        });
        cases.put("wrong key", () -> {
            answer(HttpClient.newHttpClient(), chat(MODEL, false, "wrong"), 401);
            return null;
        });
        System.out.printf("{\"version\": \"%s\"}%n", Runtime.version().feature());
        cases.forEach((name, run) -> {
            String error = "null";
            try {
                run.call();
            } catch (Exception raised) {
                raised.printStackTrace();
                error = "\"" + raised.toString().replaceAll("[\"\\\\\\p{Cntrl}]", "'") + "\"";
            }
            System.out.printf("{\"case\": \"%s\", \"error\": %s}%n", name, error);
        });
    }
}
